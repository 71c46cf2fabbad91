"""Runs many jobs: one after another, on worker processes, or together on a GPU.

Finished jobs do not run again, and a job that fails does not stop the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from excite.errors import ExciteError, TrainingStopped
from excite.jobs.executors import Executor, ProcessExecutor
from excite.jobs.job import Job, JobFailure, JointJob, readable_error, run_in_process
from excite.jobs.progress import JobProgress, ProgressCallback, ProgressFile, ProgressTracker, done
from excite.jobs.training_job import TrainingJob
from excite.jobs.workspace import Workspace
from excite.train import from_config as training


class JobsFailed(TrainingStopped):
    """Some jobs could not be finished; `failures` lists them."""

    def __init__(self, message: str, failures: Sequence[JobFailure] = ()) -> None:
        super().__init__(message)
        self.failures = tuple(failures)


def run_jobs(
    jobs: Sequence[Job],
    workers: int = 2,
    on_progress: ProgressCallback | None = None,
    executor: Executor | None = None,
    *,
    workspace: Workspace | None = None,
    retries: int = 1,
) -> None:
    """Runs the jobs that are not finished.

    Args:
        jobs: The jobs, all with folders in one parent folder.
        workers: Without an executor: number of worker processes on the CPU; 1 for this process.
        on_progress: Called with the state of every job at the start, and then with each change. tasks.json beside the runs
            holds the same for the live page.
        executor: Runs the jobs (see `find_executor`). By default they run together on a GPU where that is possible, else on
            worker processes, or in this one.
        workspace: Where the runs are stored, if not in the folders of the jobs.
        retries: Without an executor: how often a job is started again after an error that may be transient.

    Raises:
        JobsFailed: After all other jobs are done. The next call tries the failed ones again.
    """
    jobs = list(jobs) if workspace is None else workspace.bind(jobs)
    tracker = ProgressTracker()
    file = None
    if jobs:
        file = ProgressFile(tracker, jobs, jobs[0].folder.parent, None if workspace is None else workspace.upload)

    def track(progress: JobProgress) -> None:
        tracker.update(progress)
        if on_progress is not None:
            on_progress(progress)

    def track_and_write(progress: JobProgress) -> None:
        track(progress)
        if file is not None:
            file.write()

    unfinished = []
    for job in jobs:
        name, is_done = job.folder.name, job.finished()
        unfinished += [] if is_done else [job]
        track(done(name) if is_done else JobProgress(name, status="waiting"))
    try:
        if executor is None:
            failures = run_locally(unfinished, workers, track_and_write, retries)
        else:
            failures = executor.run(unfinished, track_and_write)
    finally:
        if file is not None:
            file.write(ended=True)
    if failures:
        raise _summarize(failures, len(jobs)) from failures[0].error


def _summarize(failures: Sequence[JobFailure], count: int) -> JobsFailed:
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    finished = f"{count - len(failures)} of {count} jobs are finished and stored, the same command continues"
    return JobsFailed(f"{failures[0]}{more}; {finished}", failures)


def run_locally(jobs: Sequence[Job], workers: int, on_progress: ProgressCallback, retries: int = 1) -> list[JobFailure]:
    """Runs jobs without an executor: on a GPU the seeds of a variant together, else on worker processes or in this one.

    Returns:
        The jobs that failed.
    """
    on_gpu = [job for job in jobs if isinstance(job, TrainingJob) and _uses_gpu(job)]
    joint = [job for job in jobs if isinstance(job, JointJob)]
    separate = [job for job in jobs if job not in on_gpu and job not in joint]
    failures = [
        failure
        for _, seeds in groupby(on_gpu, key=lambda job: job.variant)
        for failure in _run_seeds(list(seeds), on_progress, retries)
    ]
    if joint:
        failures += _run_jointly(joint, on_progress)
    if workers > 1 and separate:
        return failures + ProcessExecutor(workers, retries).run(separate, on_progress)
    return failures + _run_in_order(separate, on_progress, retries)


def _run_in_order(jobs: Sequence[Job], on_progress: ProgressCallback, retries: int) -> list[JobFailure]:
    return [failure for job in jobs if (failure := run_in_process(job, on_progress, retries)) is not None]


def _uses_gpu(job: TrainingJob) -> bool:
    return training.find_device(job.config.device).type == "cuda"


def _run_jointly(jobs: Sequence[JointJob], on_progress: ProgressCallback) -> list[JobFailure]:
    first, *other_jobs = jobs
    try:
        first.run_jointly(other_jobs, on_progress)
    except Exception as error:
        failures = [JobFailure(job, readable_error(error)) for job in jobs]
        for failure in failures:
            on_progress(failure.progress)
        return failures
    return []


def _run_seeds(jobs: list[TrainingJob], on_progress: ProgressCallback, retries: int = 0) -> list[JobFailure]:
    """Jobs that differ in their seed only: trained together where that is possible, measured one by one."""
    untrained = [job for job in jobs if not job.trained()]
    if len(untrained) > 1:

        def on_step(phase: str, done: int, total: int) -> None:
            for job in untrained:
                on_progress(job.training_progress(done, total))

        try:
            configs, folders = [job.config for job in untrained], [job.folder for job in untrained]
            for run in training.train_together(configs, folders, on_step):
                run.close()
        except (ExciteError, torch.OutOfMemoryError):
            # Continue one by one: trained seeds are not trained again, and each error belongs to its job.
            torch.cuda.empty_cache()
    return _run_in_order(jobs, on_progress, retries)
