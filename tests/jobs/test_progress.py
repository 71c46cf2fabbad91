"""The state of all jobs from their messages: counts, time left, tasks.json."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from excite.errors import TrainingStopped
from excite.jobs.progress import (
    JobProgress,
    LatestProgress,
    ProgressFile,
    ProgressTracker,
    count_jobs,
    done,
    with_tracker,
)
from excite.jobs.scheduler import run_jobs
from jobs.sleep_jobs import jobs


def five_jobs(clock: Callable[[], float] | None = None) -> ProgressTracker:
    """One that was finished before, and four that wait."""
    tracker = ProgressTracker() if clock is None else ProgressTracker(clock)
    tracker.update(done("found-0"))
    for name in ("a-1", "b-2", "c-3", "d-4"):
        tracker.update(JobProgress(name, status="waiting"))
    return tracker


def test_counts_and_time_left_follow_the_messages() -> None:
    now = [0.0]
    tracker = five_jobs(lambda: now[0])
    assert str(tracker) == "5 jobs: 1 done"
    assert tracker.seconds_left() is None
    now[0] = 10.0
    for progress in (JobProgress("a-1", "starting"), JobProgress("a-1", "training", 0.5), done("b-2"), JobProgress("c-3", "training", 0.25)):  # fmt: skip
        tracker.update(progress)
    assert {status: tracker.count(status) for status in ("waiting", "running", "done", "failed")} == {
        "waiting": 1, "running": 2, "done": 2, "failed": 0
    }  # fmt: skip
    # 1.75 jobs in 10 s, 2.25 are left; the one that was finished before says nothing of the pace
    assert tracker.seconds_left() == pytest.approx(2.25 / 1.75 * 10)
    tracker.update(JobProgress("c-3", status="waiting"))  # its process was lost
    assert tracker.count("waiting") == 2
    tracker.update(JobProgress("c-3", status="failed", reason="no memory"))
    tracker.update(JobProgress("c-3", "training", 0.9))  # a late message
    tracker.update(JobProgress("b-2", "training", 0.9))
    assert [job.reason for job in tracker.with_status("failed")] == ["no memory"]
    assert str(tracker) == "5 jobs: 1 running, 2 done, 1 failed, 10 s left"
    assert tracker.done == pytest.approx(2.5)


def test_tasks_json_is_written_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    tracker, uploaded = five_jobs(), []
    five = jobs(tmp_path, "found", "a", "b", "c", "d")
    file = ProgressFile(tracker, five, tmp_path / "new", uploaded.append)
    file.write()
    tracker.update(JobProgress("a-1", "training", 0.5))
    file.write()  # too soon
    content = json.loads((tmp_path / "new/tasks.json").read_text())
    assert [entry["state"] for entry in content["tasks"]] == ["done", "waiting", "waiting", "waiting", "waiting"]
    file.write(ended=True)
    content = json.loads((tmp_path / "new/tasks.json").read_text())
    assert content["ended"]
    assert uploaded == ["tasks.json", "tasks.json"]
    assert content["tasks"][1] == {
        "name": "a-1", "arm": "a", "seed": 1, "log": str(tmp_path / "logs/a-1.log"), "state": "running",
        "phase": "training", "share": 0.5, "reason": None, "found": False,
    }  # fmt: skip
    (tmp_path / "file").write_text("")
    ProgressFile(tracker, five, tmp_path / "file").write(ended=True)  # jobs continue without it


def test_every_job_is_reported_and_a_failure_leaves_its_log(tmp_path: Path) -> None:
    three = jobs(tmp_path, "fine", "fails always", "fine")
    messages: list[JobProgress] = []
    with pytest.raises(TrainingStopped, match="fails-always-1: a failure that stays"):
        run_jobs(three, 1, messages.append, retries=0)
    assert [(message.name, message.status) for message in messages[:3]] == [
        (job.folder.name, "waiting") for job in three
    ]
    assert [message.status for message in messages if message.name == "fails-always-1"] == [
        "waiting", "running", "failed"
    ]  # fmt: skip
    content = json.loads((tmp_path / "tasks.json").read_text())
    assert [entry["state"] for entry in content["tasks"]] == ["done", "failed", "done"]
    assert content["ended"]
    log = next(message.log for message in messages if message.status == "failed")
    assert log == content["tasks"][1]["log"]
    assert "RuntimeError: a failure that stays" in Path(log).read_text()  # also without worker processes


def test_callbacks_of_earlier_versions() -> None:
    calls: list[tuple[str, float, float]] = []
    states: list[str] = []
    for callback in (count_jobs(lambda *call: calls.append(call)), with_tracker(lambda t: states.append(str(t)))):
        callback(JobProgress("a", status="waiting"))
        callback(JobProgress("a", "training", 0.5))
    assert calls == [("waiting a", 0.0, 1), ("training a", 0.5, 1)]
    assert states[0] == "1 jobs: none started"


def test_the_latest_message_of_each_job_is_drained_once() -> None:
    latest = LatestProgress()
    for progress in (JobProgress("a", "training", 0.1), JobProgress("b"), JobProgress("a", "training", 0.2)):
        latest.put(progress)
    assert latest.drain() == [JobProgress("a", "training", 0.2), JobProgress("b")]
    assert latest.drain() == []


def test_the_module_does_not_import_torch() -> None:
    code = "import sys, excite.jobs.progress, excite.jobs.node_report; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
