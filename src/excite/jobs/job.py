"""A job: something that takes a while and leaves its result in a folder, such as a training and its measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from excite.errors import ExciteError, RunError, one_line
from excite.jobs.logs import log_path, log_to_file
from excite.jobs.progress import JobProgress, ProgressCallback
from excite.runs.store import StoreError


class Job(Protocol):
    """Deterministic, and safe to start again: a second start continues from what the folder holds.

    Jobs of one `variant` differ only in their `seed`. The name of the folder is the name of the job.
    """

    @property
    def variant(self) -> str:
        """Name of the variant that is trained."""
        ...

    @property
    def seed(self) -> int:
        """Seed of the job."""
        ...

    @property
    def folder(self) -> Path:
        """Folder that the job writes to."""
        ...

    def finished(self) -> bool:
        """Whether the folder holds the complete result."""

    def run(self, on_progress: ProgressCallback) -> None:
        """Does what is left of the job; the last message is `excite.jobs.progress.done`."""


@runtime_checkable
class JointJob(Job, Protocol):
    """A job that runs at once with others of its kind, such as networks of one ensemble."""

    def run_jointly(self, other_jobs: Sequence[Any], on_progress: ProgressCallback) -> None:
        """Runs this job and others of its kind in one pass."""
        ...


@dataclass(frozen=True)
class JobFailure:
    """A job that could not be finished, its error, and the file or URL of its output."""

    job: Job
    error: Exception
    log: str | None = None

    @property
    def progress(self) -> JobProgress:
        """The message that reports it."""
        return JobProgress(self.job.folder.name, status="failed", reason=one_line(self.error), log=self.log)

    def __str__(self) -> str:
        log = f" (log: {self.log})" if self.log is not None else ""
        return f"{self.job.folder.name}: {one_line(self.error)}{log}"


class WorkerLost(RunError):
    """A process or a machine ended before its job did."""


def run_in_process(job: Job, on_progress: ProgressCallback, retries: int = 0) -> JobFailure | None:
    """Runs a job in this process; its output stays on the terminal, an error is written to its log.

    Args:
        job: The job.
        on_progress: Called with its progress.
        retries: How often it is started again after an error that may be transient (`is_transient`).

    Returns:
        The failure, or None if the job is done.
    """
    on_progress(JobProgress(job.folder.name, "starting"))
    try:
        with single_thread():
            job.run(on_progress)
    except Exception as error:
        failure = JobFailure(job, readable_error(error), _write_to_log(job, error))
        if retries > 0 and is_transient(failure.error):
            return run_in_process(job, on_progress, retries - 1)
        on_progress(failure.progress)
        return failure
    return None


def _write_to_log(job: Job, error: Exception) -> str:
    with suppress(Exception), log_to_file(job):
        raise error
    return log_path(job)


def readable_error(error: Exception) -> Exception:
    """An out-of-memory error in one line; any other error unchanged."""
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        return RunError(f"out of memory on the GPU ({one_line(error)[:80]}…)")
    return error


def is_transient(error: Exception) -> bool:
    """Whether another try may succeed: not after a refused input, but after a lost process, store or memory."""
    return (
        not isinstance(error, ExciteError)
        or isinstance(error, WorkerLost | StoreError)
        or "out of memory" in str(error)
    )


@contextmanager
def single_thread() -> Iterator[None]:
    """One thread, so that a job gives the same bits everywhere: sums over several threads add in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
