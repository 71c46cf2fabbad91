"""The view of all jobs on a terminal and on a pipe."""

from __future__ import annotations

import io

from rich.console import Console

from excite.jobs.progress import JobProgress, done
from excite.jobs.terminal import JobView

FAILED = JobProgress("b-2", status="failed", reason="no [memory]", log="logs/b-2.log")
START = [done("found-0"), *(JobProgress(name, status="waiting") for name in ("a-1", "b-2", "c-3", "d-4"))]


def test_on_a_pipe_a_line_at_intervals_and_one_per_failure() -> None:
    out = io.StringIO()
    with JobView(Console(file=out, width=200), interval=1000.0) as view:
        for progress in (*START, *(JobProgress("a-1", "training", step / 50) for step in range(50)), FAILED):
            view(progress)
    lines = out.getvalue().splitlines()
    assert lines[0] == "5 jobs: 1 running, 1 done"
    assert lines[1].startswith("5 jobs: 1 running, 1 done, 1 failed")  # failures are printed at once
    assert lines[-1] == "failed: b-2: no [memory] (log: logs/b-2.log)"
    assert len(lines) <= 4


def test_on_a_pipe_jobs_that_were_all_finished_are_one_line() -> None:
    out = io.StringIO()
    with JobView(Console(file=out, width=200)) as view:
        view(done("a-0"))
        view(done("b-1"))
    assert out.getvalue() == "2 jobs: 2 done\n"


def test_on_a_terminal_running_jobs_with_their_fractions() -> None:
    out = io.StringIO()
    with JobView(Console(file=out, width=200, force_terminal=True)) as view:
        for progress in (*START, JobProgress("a-1", "training", 0.25), FAILED):
            view(progress)
    text = out.getvalue()
    assert "5 jobs: 1 running, 1 done, 1 failed" in text
    assert [line.split() for line in text.splitlines() if line.startswith("b-2")] == [
        ["b-2", "no", "[memory]", "logs/b-2.log"]
    ]
    assert "25 %" in text
    assert "training" in text
