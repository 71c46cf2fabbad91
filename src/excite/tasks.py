"""Many pieces of work, most of them a training and its measurement: in a row, on worker processes, or together on a GPU.

Every task has a folder. What is finished is not done again; a task that fails does not stop the others.
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
from typing import Any, Protocol, runtime_checkable

import torch

from excite import training
from excite.config import TrainConfig, parse_config
from excite.errors import ExciteError, InputError, RunError, TrainingStopped
from excite.measuring import PARTS, SavedModel, artifact_name, load_model, measure
from excite.runs import Run, load_run
from excite.runs.folder import one_line

Tell = Callable[[str, str, float], None]  # folder, phase, share done
_TRAINING, _MEASURING = 3, 1  # shares of a task's time, for the progress bar


class Work(Protocol):
    """One piece of work in a folder of its own."""

    @property
    def arm(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def folder(self) -> Path: ...
    def finished(self) -> bool:
        """Whether the folder holds everything already, so that what was stopped goes on where it was."""

    def perform(self, tell: Tell) -> None: ...


@runtime_checkable
class JointWork(Work, Protocol):
    """Work that is done at once with other work of its kind."""

    def perform_with(self, others: Sequence[Any], tell: Tell) -> None: ...


class Measurement(Protocol):
    """What is measured of a trained model, into the artifacts of its run."""

    def taken(self, run: Run, config: TrainConfig) -> bool: ...
    def take(self, saved: SavedModel, arm: str, progress: Callable[[float], None]) -> None: ...


@dataclass(frozen=True)
class MarginsTaken:
    """Margins of at most `points` training and test points; with `certify` lower bounds too."""

    points: int | None = None
    certify: bool = True

    def taken(self, run: Run, config: TrainConfig) -> bool:
        names = [artifact_name("inf", part) for part in PARTS]
        if not all((run.path / f"artifacts/{name}.json").exists() for name in [*names, "summary"]):
            return False
        for part, name in zip(PARTS, names):
            there = getattr(config.data, part)
            wanted = min(n for n in (self.points, there) if n is not None) if self.points is not None else 0
            if len(run.read_json(name).get("values", ())) < wanted:
                return False
        return True

    def take(self, saved: SavedModel, arm: str, progress: Callable[[float], None]) -> None:
        def tell(phase: str, done: int, total: int) -> None:
            progress((0.5 if phase.endswith("test") else 0.0) + 0.5 * done / max(total, 1))

        measure(saved, arm=arm, most=self.points, certify=self.certify, progress=tell)


@dataclass(frozen=True)
class Task:
    """One training and its measurement."""

    arm: str
    seed: int
    folder: Path
    config: TrainConfig
    measurement: Measurement = MarginsTaken()

    def trained(self) -> bool:
        """A run that is done is done, on whichever device."""
        if not (self.folder / "run.json").exists():
            return False
        with load_run(self.folder) as run:
            return _trained(run, self)

    def finished(self) -> bool:
        if not (self.folder / "run.json").exists():
            return False
        with load_run(self.folder) as run:
            return _trained(run, self) and self.measurement.taken(run, self.config)

    def perform(self, tell: Tell) -> None:
        name = self.folder.name

        def progress(phase: str, done: int, total: int) -> None:
            tell(name, "training", _TRAINING / (_TRAINING + _MEASURING) * done / max(total, 1))

        training.train(self.config, self.folder, progress=progress).close()
        saved = load_model(self.folder).to(training.find_device(self.config.device))
        whole = _TRAINING + _MEASURING
        self.measurement.take(
            saved, self.arm, lambda share: tell(name, "measuring", (_TRAINING + _MEASURING * share) / whole)
        )
        tell(name, "done", 1.0)


@dataclass(frozen=True)
class Failure:
    """A task that could not be finished, and why."""

    task: Work
    error: Exception

    def __str__(self) -> str:
        return f"{self.task.folder.name}: {one_line(self.error)}"


def complete(todo: Sequence[Work], workers: int, progress: Callable[[str, float, float], None] | None = None) -> None:
    """Do what is not finished of `todo`; tasks that fail are one error at the end, and the next call tries them again.

    progress(what is going on, tasks done, tasks in all); a task under way counts in part.
    """
    left = [task for task in todo if not task.finished()]
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


def _trained(run: Run, task: Task) -> bool:
    try:
        made = parse_config(run.config)
    except InputError:
        return False
    return run.status == "done" and made.model_copy(update={"device": task.config.device}) == task.config


def perform_all(todo: Sequence[Work], workers: int, tell: Tell) -> list[Failure]:
    """All tasks; returns those that failed. On a GPU one process trains the seeds of an arm together."""
    on_gpu = [task for task in todo if isinstance(task, Task) and _is_on_gpu(task)]
    if on_gpu:
        failures = [failure for group in _groups(on_gpu) for failure in _perform_group(group, tell)]
        return failures + perform_all([task for task in todo if task not in on_gpu], workers, tell)
    joint = [task for task in todo if isinstance(task, JointWork)]
    if joint:
        failures = _attempt_together(joint, tell)
        return failures + perform_all([task for task in todo if task not in joint], workers, tell)
    if workers <= 1 or not todo:
        return [failure for task in todo if (failure := _attempt(task, tell)) is not None]
    return _spread(todo, workers, tell)


def _is_on_gpu(task: Task) -> bool:
    return training.find_device(task.config.device).type == "cuda"


def _attempt(task: Work, tell: Tell) -> Failure | None:
    try:
        task.perform(tell)
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        device = task.config.device if isinstance(task, Task) else "cuda"
        return Failure(task, RunError(f"out of memory on {device} ({one_line(error)[:80]}…)"))
    except Exception as error:
        return Failure(task, error)
    return None


def _attempt_together(joint: Sequence[JointWork], tell: Tell) -> list[Failure]:
    first, *others = joint
    try:
        first.perform_with(others, tell)
    except Exception as error:
        return [Failure(task, error) for task in joint]
    return []


def _groups(todo: Sequence[Task]) -> list[list[Task]]:
    return [list(group) for _, group in groupby(todo, key=lambda task: task.arm)]


def _perform_group(group: list[Task], tell: Tell) -> list[Failure]:
    """Tasks that differ in their seed only: trained together where that is possible, measured one by one."""
    untrained = [task for task in group if not task.trained()]
    if len(untrained) > 1:

        def progress(phase: str, done: int, total: int) -> None:
            for task in untrained:
                tell(task.folder.name, "training", _TRAINING / (_TRAINING + _MEASURING) * done / max(total, 1))

        try:
            configs, folders = [task.config for task in untrained], [task.folder for task in untrained]
            for run in training.train_together(configs, folders, progress):
                run.close()
        except (ExciteError, torch.OutOfMemoryError):
            torch.cuda.empty_cache()  # one by one below: what is trained already is not trained again, and each error has its task
    return [failure for task in group if (failure := _attempt(task, tell)) is not None]


def _spread(todo: Sequence[Work], workers: int, tell: Tell) -> list[Failure]:
    """On worker processes of one thread each."""
    context = multiprocessing.get_context("spawn")
    manager = SyncManager(ctx=context)
    manager.start(_ignore_interrupts)
    failures: list[Failure] = []
    with manager, ProcessPoolExecutor(workers, context, initializer=_start_worker) as pool:
        messages, stop = manager.Queue(), manager.Event()
        running: dict[Future[None], Work] = {pool.submit(_work, task, messages, stop): task for task in todo}
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


def _work(task: Work, messages: Any, stop: Any) -> None:
    last = -1.0

    def tell(name: str, phase: str, share: float) -> None:
        nonlocal last
        if share - last >= 0.01 or share >= 1:
            last = share
            messages.put((name, phase, share))
            if stop.is_set():
                raise KeyboardInterrupt

    task.perform(tell)
