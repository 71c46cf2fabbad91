"""Executors run jobs: worker processes of this machine, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from excite._core.compatibility import renamed_names
from excite.errors import InputError
from excite.jobs.job import Job, JobFailure
from excite.jobs.local import ProcessExecutor
from excite.jobs.progress import ProgressCallback

__all__ = ["Executor", "ProcessExecutor", "find_executor"]


class Executor(Protocol):
    """Protocol of what runs jobs; `find_executor` returns one by its name.

    Example:
        >>> class Here:
        ...     def run(self, jobs, on_progress):
        ...         for job in jobs:
        ...             job.run(on_progress)
        ...         return []
    """

    def run(self, jobs: Sequence[Job], on_progress: ProgressCallback) -> list[JobFailure]:
        """Runs all jobs.

        Args:
            jobs: The jobs.
            on_progress: Called with a `JobProgress` whenever a job changes.

        Returns:
            Those that could not be finished.
        """


def find_executor(on: str | None, workers: int = 2, gpus: float = 0.0, retries: int = 1) -> Executor | None:
    """The executor with a name, for `excite.studies.run` and `excite.jobs.sweep.run_sweep`.

    Args:
        on: "local" for worker processes, "ray" for a Ray cluster started on this machine, "ray:ADDRESS" for a running
            cluster; None for no executor.
        workers: Number of worker processes, or processors of the cluster started here.
        gpus: GPUs for each job; 0.25 lets four jobs share one.
        retries: How often a job is started again after a lost process or machine, or an unexpected error.

    Returns:
        The executor, or None for `on=None`.

    Raises:
        InputError: For an unknown name, or GPUs without an executor.

    Example:
        >>> from excite.jobs.executors import find_executor
        >>> find_executor("local", workers=4)
        ProcessExecutor(workers=4, retries=1, gpus=0.0)
    """
    if on is None:
        if gpus:
            raise InputError("gpus-per-job needs worker processes: --on local, --on ray or --on ray:ADDRESS")
        return None
    name, _, address = str(on).partition(":")
    if name == "local" and not address:
        return ProcessExecutor(workers, retries, gpus)
    if name == "ray":
        from excite.jobs.ray import RayExecutor

        return RayExecutor(address or None, workers, gpus, retries)
    raise InputError(f"on: expected 'local', 'ray' or 'ray:ADDRESS'; got {on!r}")


__getattr__ = renamed_names(
    __name__, {"find_engine": "find_executor", "Engine": "Executor", "Workers": "ProcessExecutor"}
)
