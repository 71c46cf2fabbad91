"""Jobs in this process: retries, failures, threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from excite.errors import InputError, RunError
from excite.jobs.job import JobFailure, WorkerLost, is_transient, readable_error, run_in_process, single_thread
from excite.jobs.progress import JobProgress
from excite.runs.store import StoreError
from jobs.sleep_jobs import jobs, tries_of


def test_a_transient_error_is_retried(tmp_path: Path) -> None:
    once, always, refused = jobs(tmp_path, "fails once", "fails always", "refused")
    messages: list[JobProgress] = []
    assert run_in_process(once, messages.append, retries=2) is None
    assert [message.status for message in messages] == ["running", "running", "done"]
    failure = run_in_process(always, messages.append, retries=2)
    assert failure is not None
    assert messages[-1] == failure.progress
    assert run_in_process(refused, messages.append, retries=2) is not None
    assert [tries_of(job) for job in (once, always, refused)] == [2, 3, 1]


def test_a_failure_names_the_job_its_error_and_its_log(tmp_path: Path) -> None:
    job = jobs(tmp_path, "fine")[0]
    failure = JobFailure(job, RuntimeError("two\nlines"), "logs/fine-0.log")
    assert str(failure) == "fine-0: two lines (log: logs/fine-0.log)"
    assert failure.progress == JobProgress("fine-0", status="failed", reason="two lines", log="logs/fine-0.log")
    assert str(JobFailure(job, RuntimeError("no log"))) == "fine-0: no log"


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (RuntimeError("unexpected"), True),
        (WorkerLost("its process was killed"), True),
        (StoreError("no network"), True),
        (readable_error(torch.OutOfMemoryError("CUDA out of memory")), True),
        (InputError("radius: expected a number"), False),
        (RunError("another config"), False),
    ],
)
def test_which_errors_may_pass(error: Exception, transient: bool) -> None:
    assert is_transient(error) is transient


def test_threads_are_restored() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyError), single_thread():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before
