"""Many pieces of work, most of them a training and its measurement: in a row, on worker processes, or together on a GPU.

Every task has a folder. What is finished is not done again; a task that fails does not stop the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch

from excite.errors import ExciteError, InputError, RunError, TrainingStopped
from excite.jobs.executors import Engine, Workers
from excite.jobs.job import Failure, JointWork, Tell, Work, attempt, failed, in_words
from excite.jobs.progress import Noted, Tally
from excite.jobs.workspace import Place
from excite.runs import Run, load_run
from excite.train import from_config as training
from excite.train.config import TrainConfig, parse_config
from excite.train.evaluate import PARTS, SavedModel, artifact_name, load_model, measure

_TRAINING, _MEASURING = 3, 1  # shares of a task's time, for the progress bar


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
        return self._holds(lambda run: True)

    def finished(self) -> bool:
        return self._holds(lambda run: self.measurement.taken(run, self.config))

    def _holds(self, measured: Callable[[Run], bool]) -> bool:
        if not (self.folder / "run.json").exists():
            return False
        # A damaged run is not finished: `perform` says why, and the other tasks go on.
        with suppress(RunError), load_run(self.folder) as run:
            return _trained(run, self) and measured(run)
        return False

    def perform(self, tell: Tell) -> None:
        name = self.folder.name

        def progress(phase: str, done: int, total: int) -> None:
            tell(name, "training", _TRAINING / (_TRAINING + _MEASURING) * done / max(total, 1))

        training.train(self.config, self.folder, progress=progress).close()  # refuses a run of another config
        saved = load_model(self.folder, trust=True).to(training.find_device(self.config.device))
        whole = _TRAINING + _MEASURING
        self.measurement.take(
            saved, self.arm, lambda share: tell(name, "measuring", (_TRAINING + _MEASURING * share) / whole)
        )
        tell(name, "done", 1.0)


class WorkStopped(TrainingStopped):
    """Some work could not be finished; `failures` says which."""

    def __init__(self, message: str, failures: Sequence[Failure] = ()) -> None:
        super().__init__(message)
        self.failures = tuple(failures)


def complete(
    todo: Sequence[Work],
    workers: int,
    progress: Callable[[str, float, float], None] | None = None,
    engine: Engine | None = None,
    *,
    show: Callable[[Tally], None] | None = None,
    place: Place | None = None,
    retries: int = 1,
) -> None:
    """Do what is not finished of `todo`; tasks that fail are one error at the end, and the next call tries them again.

    Without an engine: together on a GPU where that is possible, else on `workers` processes, or in this one; what fails
    for no reason of its own is tried `retries` times more. An engine knows its own number.

    progress(what is going on, tasks done, tasks in all); a task under way counts in part. `show` is called with the state
    of all tasks whenever it changes; tasks.json beside the runs holds it for pages. `place`: where the runs are kept.
    """
    todo = list(todo) if place is None else place.works(todo)
    left = [task for task in todo if not task.finished()]
    tally = Tally(todo, left)
    note = Noted(tally, todo[0].folder.parent, None if place is None else place.keep) if todo else None

    def tell(name: str, phase: str, share: float) -> None:
        tally.tell(name, phase, share)
        if progress is not None:
            progress(f"{phase} {name}", tally.done, len(todo))
        if show is not None:
            show(tally)
        if note is not None:
            note()

    if show is not None:
        show(tally)
    try:
        failures = perform_all(left, workers, tell, retries) if engine is None else engine.perform(left, tell)
    finally:
        if note is not None:
            note(ended=True)
    if failures:
        more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
        raise WorkStopped(
            f"{failures[0]}{more}; {len(todo) - len(failures)} of {len(todo)} trainings are finished and kept, the same "
            "command continues",
            failures,
        ) from failures[0].error


def _trained(run: Run, task: Task) -> bool:
    try:
        made = parse_config(run.config)
    except InputError:
        return False
    return run.status == "done" and made.model_copy(update={"device": task.config.device}) == task.config


def perform_all(todo: Sequence[Work], workers: int, tell: Tell, retries: int = 1) -> list[Failure]:
    """All tasks; returns those that failed. On a GPU one process trains the seeds of an arm together."""
    on_gpu = [task for task in todo if isinstance(task, Task) and _is_on_gpu(task)]
    if on_gpu:
        failures = [failure for group in _groups(on_gpu) for failure in _perform_group(group, tell, retries)]
        return failures + perform_all([task for task in todo if task not in on_gpu], workers, tell, retries)
    joint = [task for task in todo if isinstance(task, JointWork)]
    if joint:
        failures = _attempt_together(joint, tell)
        return failures + perform_all([task for task in todo if task not in joint], workers, tell, retries)
    if workers <= 1 or not todo:
        return [failure for task in todo if (failure := attempt(task, tell, retries)) is not None]
    return Workers(workers, retries).perform(todo, tell)


def _is_on_gpu(task: Task) -> bool:
    return training.find_device(task.config.device).type == "cuda"


def _attempt_together(joint: Sequence[JointWork], tell: Tell) -> list[Failure]:
    first, *others = joint
    try:
        first.perform_with(others, tell)
    except Exception as error:
        said = in_words(error)
        for task in joint:
            tell(task.folder.name, failed(said), 0.0)
        return [Failure(task, said) for task in joint]
    return []


def _groups(todo: Sequence[Task]) -> list[list[Task]]:
    return [list(group) for _, group in groupby(todo, key=lambda task: task.arm)]


def _perform_group(group: list[Task], tell: Tell, retries: int = 0) -> list[Failure]:
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
    return [failure for task in group if (failure := attempt(task, tell, retries)) is not None]
