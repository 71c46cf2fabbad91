"""Many trainings, each with its margins measured: one after another, on worker processes, or together on a GPU.

Every task has a run folder. What is finished is not done again; a task that fails does not stop the others.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import groupby
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import torch

from excite import training
from excite.config import TrainConfig, parse_config
from excite.errors import ExciteError, InputError, RunError, TrainingStopped
from excite.measuring import PARTS, artifact_name, load_model, measure
from excite.runs import Run, load_run
from excite.runs.folder import one_line

Tell = Callable[[str, str, float], None]  # folder, phase, share done
_TRAINING, _MEASURING = 3, 1  # shares of a task's time, for the progress bar


@dataclass(frozen=True)
class Task:
    """One training and its measurement."""

    arm: str
    seed: int
    folder: Path
    config: TrainConfig
    points: int | None = None  # at most this many training and test points are measured
    certify: bool = True  # lower bounds on the margins too


@dataclass(frozen=True)
class Failure:
    """A task that could not be finished, and why."""

    task: Task
    error: Exception

    def __str__(self) -> str:
        return f"{self.task.folder.name}: {one_line(self.error)}"


def complete(todo: Sequence[Task], workers: int, progress: Callable[[str, float, float], None] | None = None) -> None:
    """Do what is not finished of `todo`; tasks that fail are one error at the end, and the next call tries them again.

    progress(what is going on, tasks done, tasks in all); a task under way counts in part.
    """
    left = [task for task in todo if not finished(task)]
    shares = {task.folder.name: 0.0 if task in left else 1.0 for task in todo}

    def tell(name: str, phase: str, share: float) -> None:
        shares[name] = share
        if progress is not None:
            progress(f"{phase} {name}", sum(shares.values()), len(todo))

    failures = perform_all(left, workers, tell)
    if failures:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise TrainingStopped(
            f"{failures[0]}{more}; {len(todo) - len(failures)} of {len(todo)} trainings are finished and kept, the same "
            "command continues"
        ) from failures[0].error


def finished(task: Task) -> bool:
    """Whether the task's folder holds everything already, so that what was stopped goes on where it was."""
    if not (task.folder / "run.json").exists():
        return False
    with load_run(task.folder) as run:
        return _trained(run, task) and _measured(run, task)


def _is_trained(task: Task) -> bool:
    if not (task.folder / "run.json").exists():
        return False
    with load_run(task.folder) as run:
        return _trained(run, task)


def _trained(run: Run, task: Task) -> bool:
    """A run that is done is done, on whichever device."""
    try:
        made = parse_config(run.config)
    except InputError:
        return False
    return run.status == "done" and made.model_copy(update={"device": task.config.device}) == task.config


def _measured(run: Run, task: Task) -> bool:
    names = [artifact_name("inf", part) for part in PARTS]
    if not all((run.path / f"artifacts/{name}.json").exists() for name in [*names, "summary"]):
        return False
    for part, name in zip(PARTS, names):
        there = getattr(task.config.data, part)
        wanted = min(n for n in (task.points, there) if n is not None) if task.points is not None else 0
        if len(run.read_json(name).get("values", ())) < wanted:
            return False
    return True


def perform(task: Task, tell: Tell) -> None:
    """Train and measure one task."""
    name = task.folder.name

    def progress(phase: str, done: int, total: int) -> None:
        tell(name, "training", _TRAINING / (_TRAINING + _MEASURING) * done / max(total, 1))

    training.train(task.config, task.folder, progress=progress).close()
    _measure(task, tell)


def _measure(task: Task, tell: Tell) -> None:
    whole = _TRAINING + _MEASURING

    def progress(phase: str, done: int, total: int) -> None:
        before = 0.5 if phase.endswith("test") else 0.0
        share = (_TRAINING + _MEASURING * (before + 0.5 * done / max(total, 1))) / whole
        tell(task.folder.name, "measuring margins", share)

    saved = load_model(task.folder).to(training.find_device(task.config.device))
    measure(saved, arm=task.arm, most=task.points, certify=task.certify, progress=progress)
    tell(task.folder.name, "done", 1.0)


def perform_all(todo: Sequence[Task], workers: int, tell: Tell) -> list[Failure]:
    """All tasks; returns those that failed. On a GPU one process trains the seeds of an arm together."""
    if any(training.find_device(task.config.device).type == "cuda" for task in todo):
        return [failure for group in _groups(todo) for failure in _perform_group(group, tell)]
    if workers <= 1:
        return [failure for task in todo if (failure := _attempt(task, tell)) is not None]
    return _spread(todo, workers, tell)


def _attempt(task: Task, tell: Tell) -> Failure | None:
    try:
        perform(task, tell)
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return Failure(task, RunError(f"out of memory on {task.config.device} ({one_line(error)[:80]}…)"))
    except Exception as error:
        return Failure(task, error)
    return None


def _groups(todo: Sequence[Task]) -> list[list[Task]]:
    return [list(group) for _, group in groupby(todo, key=lambda task: task.arm)]


def _perform_group(group: list[Task], tell: Tell) -> list[Failure]:
    """Tasks that differ in their seed only: trained together where that is possible, measured one by one."""
    together: Any = getattr(training, "train_together", None)
    untrained = [task for task in group if not _is_trained(task)]
    if together is not None and len(untrained) > 1:

        def progress(phase: str, done: int, total: int) -> None:
            for task in untrained:
                tell(task.folder.name, "training", _TRAINING / (_TRAINING + _MEASURING) * done / max(total, 1))

        try:
            for run in together([task.config for task in untrained], [task.folder for task in untrained], progress):
                run.close()
        except (ExciteError, torch.OutOfMemoryError):
            torch.cuda.empty_cache()  # one by one below: what is trained already is not trained again, and each error has its task
    return [failure for task in group if (failure := _attempt(task, tell)) is not None]


def _spread(todo: Sequence[Task], workers: int, tell: Tell) -> list[Failure]:
    """On worker processes of one thread each."""
    context = multiprocessing.get_context("spawn")
    manager = SyncManager(ctx=context)
    manager.start(_ignore_interrupts)
    failures: list[Failure] = []
    with manager, ProcessPoolExecutor(workers, context, initializer=_start_worker) as pool:
        messages, stop = manager.Queue(), manager.Event()
        running: dict[Future[None], Task] = {pool.submit(_work, task, messages, stop): task for task in todo}
        try:
            while running:
                done, _ = wait(running, timeout=0.1)
                while True:
                    try:
                        tell(*messages.get_nowait())
                    except queue.Empty:
                        break
                for future in done:
                    task, error = running.pop(future), future.exception()
                    if isinstance(error, Exception):
                        failures.append(Failure(task, error))
                    elif error is not None:
                        raise error
        except BaseException:
            stop.set()  # workers end at their next message, and leave runs that can be continued
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return failures


def _ignore_interrupts() -> None:
    # Ctrl-C reaches every process of the terminal; only the first one is to act on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _start_worker() -> None:
    _ignore_interrupts()
    torch.set_num_threads(1)  # small networks do not profit from more


def _work(task: Task, messages: Any, stop: Any) -> None:
    last = -1.0

    def tell(name: str, phase: str, share: float) -> None:
        nonlocal last
        if share - last >= 0.01 or share >= 1:
            last = share
            messages.put((name, phase, share))
            if stop.is_set():
                raise KeyboardInterrupt

    perform(task, tell)
