"""Many jobs: what runs, where, and what is reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from excite.errors import TrainingStopped
from excite.jobs.job import Job, JobFailure
from excite.jobs.progress import JobProgress, ProgressCallback
from excite.jobs.scheduler import JobsFailed, run_jobs, run_locally
from jobs.sleep_jobs import SleepJob, jobs, tries_of


@dataclass(frozen=True)
class JointSleepJob(SleepJob):
    def run_jointly(self, others: Sequence[SleepJob], on_progress: ProgressCallback) -> None:
        for job in (self, *others):
            job.run(on_progress)


class Recorder:
    """An executor that runs nothing."""

    def __init__(self) -> None:
        self.received: list[Job] = []

    def run(self, jobs: Sequence[Job], on_progress: ProgressCallback) -> list[JobFailure]:
        self.received += jobs
        return []


def test_only_unfinished_jobs_reach_the_executor(tmp_path: Path) -> None:
    two = jobs(tmp_path, "fine", "fine")
    run_jobs(two[:1], 1)
    executor, messages = Recorder(), list[JobProgress]()
    run_jobs(two, 1, messages.append, executor)
    assert executor.received == two[1:]
    assert [message.status for message in messages] == ["done", "waiting"]
    run_jobs([], 1)


def test_failures_are_one_error_after_the_other_jobs(tmp_path: Path) -> None:
    four = jobs(tmp_path, "fails once", "fails always", "refused", "fine")
    with pytest.raises(JobsFailed, match=r"fails-always-1: .* \(and 1 more\); 2 of 4 jobs are finished") as error:
        run_jobs(four, 1, retries=2)
    assert isinstance(error.value, TrainingStopped)
    assert [failure.job for failure in error.value.failures] == four[1:3]
    assert [tries_of(job) for job in four] == [2, 3, 1, 1]


def test_joint_jobs_run_at_once_and_fail_at_once(tmp_path: Path) -> None:
    fine = [JointSleepJob("fine", seed, tmp_path / f"fine-{seed}") for seed in range(2)]
    assert run_locally(fine, 2, lambda progress: None) == []
    assert all(job.finished() for job in fine)
    failing = [JointSleepJob("refused", seed, tmp_path / f"refused-{seed}") for seed in range(2)]
    messages: list[JobProgress] = []
    assert [failure.job for failure in run_locally(failing, 2, messages.append)] == failing
    assert [(message.name, message.status) for message in messages] == [
        ("refused-0", "failed"),
        ("refused-1", "failed"),
    ]
