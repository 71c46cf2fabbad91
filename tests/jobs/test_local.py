"""Worker processes: jobs run once, a killed process is replaced, failures are reported with their log."""

from __future__ import annotations

from pathlib import Path

import pytest

from excite.errors import InputError, TrainingStopped
from excite.jobs import local
from excite.jobs.local import ProcessExecutor, assign_gpus
from excite.jobs.progress import JobProgress
from excite.jobs.scheduler import run_jobs
from jobs.sleep_jobs import SleepJob, jobs, tries_of


def quiet(progress: JobProgress) -> None:
    pass


@pytest.mark.slow
def test_killed_failing_and_refused_jobs_do_not_stop_the_rest(tmp_path: Path) -> None:
    all_jobs = jobs(tmp_path, "fine", "killed once", "fails once", "fails always", "killed always", "refused", "fine")
    messages: list[JobProgress] = []
    failures = ProcessExecutor(2, retries=1).run(all_jobs, messages.append)
    assert {failure.job.variant for failure in failures} == {"fails always", "killed always", "refused"}
    assert [job.finished() for job in all_jobs] == [True, True, True, False, False, False, True]
    assert [tries_of(job) for job in all_jobs] == [1, 2, 2, 2, 2, 1, 1]  # a refusal is final
    words = {failure.job.variant: str(failure) for failure in failures}
    assert "killed by signal 9" in words["killed always"]
    assert "a failure that stays" in words["fails always"]
    assert "radius: expected a number" in words["refused"]
    log = next(failure.log for failure in failures if failure.job.variant == "fails always")
    assert log is not None
    text = Path(log).read_text()
    assert text.count("at work on fails always") == 2  # what it printed
    assert "RuntimeError: a failure that stays" in text  # and the traceback
    assert {message.name for message in messages if message.status == "done"} == {
        job.folder.name for job in all_jobs if job.finished()
    }
    assert {message.reason for message in messages if message.name == "fails-always-3"} == {
        None,
        "a failure that stays",
    }


@pytest.mark.slow
def test_only_unfinished_jobs_run_and_failures_are_reported(tmp_path: Path) -> None:
    all_jobs = jobs(tmp_path, "fine", "fails always")
    for _ in range(2):
        with pytest.raises(TrainingStopped, match=r"fails-always-1: .*log: .*fails-always-1\.log.*1 of 2 jobs"):
            run_jobs(all_jobs, 2, executor=ProcessExecutor(2, retries=0))
    assert [tries_of(job) for job in all_jobs] == [1, 2]


def test_a_job_that_does_not_pickle_is_refused_at_the_start(tmp_path: Path) -> None:
    class Local(SleepJob):
        pass

    fine = SleepJob("fine", 0, tmp_path / "fine-0")
    with pytest.raises(InputError, match="cannot be sent to another process"):
        ProcessExecutor(2).run([fine, Local("local", 1, tmp_path / "local-1")], quiet)
    assert not fine.folder.exists()


@pytest.mark.slow
def test_an_interrupt_ends_the_workers_and_keeps_results(tmp_path: Path) -> None:
    all_jobs = jobs(tmp_path, "fine", "fine", "fine", seconds=0.3)

    def stop(progress: JobProgress) -> None:
        if progress.status == "done":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ProcessExecutor(1).run(all_jobs, stop)
    assert [job.finished() for job in all_jobs] == [True, False, False]
    run_jobs(all_jobs, 2, executor=ProcessExecutor(2))
    assert all(job.finished() for job in all_jobs)


def test_gpus_of_worker_processes() -> None:
    assert assign_gpus(3, 0.0, []) == [None, None, None]
    assert assign_gpus(8, 1.0, ["0", "1"]) == ["0", "1"]
    assert assign_gpus(8, 2.0, ["0", "1", "2", "3", "4"]) == ["0,1", "2,3"]
    assert assign_gpus(8, 1.5, ["0", "1", "2"]) == ["0,1"]
    assert assign_gpus(8, 0.5, ["0", "1"]) == ["0", "1", "0", "1"]
    assert assign_gpus(3, 0.3, ["0"]) == ["0", "0", "0"]
    with pytest.raises(InputError, match="gpus-per-job 2: this machine has 1 GPU; request fewer"):
        assign_gpus(1, 2.0, ["0"])
    with pytest.raises(InputError, match="gpus-per-job 3: this machine has 2 GPUs; request fewer"):
        assign_gpus(1, 3.0, ["0", "1"])
    with pytest.raises(InputError, match=r"gpus-per-job 0\.5: this machine has 0 GPUs; leave it out"):
        assign_gpus(1, 0.5, [])


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, ["0", "1"]), ("2, 3", ["2", "3"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])],
)
def test_worker_processes_share_the_gpus_that_this_one_was_given(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: list[str]
) -> None:
    """Numbers of devices are those of the machine: with CUDA_VISIBLE_DEVICES=2,3 the first of ours is 2, not 0."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert local._visible_gpus() == expected
