"""A piece of work with a folder of its own, whoever does it: a training and its measurement, an experiment, a test's sleep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from excite.errors import ExciteError, RunError, one_line
from excite.runs.store import StoreError

# Folder, phase, share done. Engines say "starting", "waiting" (for another try) and "failed: why".
Tell = Callable[[str, str, float], None]


class Work(Protocol):
    """Deterministic, and safe to start again: what is in the folder already is kept."""

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


@dataclass(frozen=True)
class Failure:
    """Work that could not be finished, why, and where its output is."""

    task: Work
    error: Exception
    log: str | None = None

    def __str__(self) -> str:
        where = f" (log: {self.log})" if self.log is not None else ""
        return f"{self.task.folder.name}: {one_line(self.error)}{where}"


def attempt(task: Work, tell: Tell, retries: int = 0) -> Failure | None:
    """In this process: what it prints stays on the terminal, an error is written to the log."""
    tell(task.folder.name, "starting", 0.0)
    try:
        with one_thread():
            task.perform(tell)
    except Exception as error:
        failure = Failure(task, in_words(error), _note(task, error))
        if retries > 0 and worth_another_try(failure.error):
            return attempt(task, tell, retries - 1)
        tell(task.folder.name, failed(failure.error), 0.0)
        return failure
    return None


def failed(error: Exception) -> str:
    return f"failed: {one_line(error)}"


def _note(task: Work, error: Exception) -> str | None:
    from excite.jobs.logs import log_of, recorded

    with suppress(Exception), recorded(task):
        raise error
    return log_of(task)


def in_words(error: Exception) -> Exception:
    """Memory that did not suffice, said in one line; anything else as it is."""
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return RunError(f"out of memory on the GPU ({one_line(error)[:80]}…)")
    return error


def worth_another_try(error: Exception) -> bool:
    """What our own errors say of the input is true the next time too; a killed process or lost memory may not be."""
    return not isinstance(error, ExciteError) or isinstance(error, Lost | StoreError) or "out of memory" in str(error)


class Lost(RunError):
    """A process or a machine that ended before its work did."""


@contextmanager
def one_thread() -> Iterator[None]:
    """The same work gives the same bits wherever it is done: sums over several threads add in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
