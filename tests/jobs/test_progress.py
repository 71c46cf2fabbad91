"""The state of all tasks: counts, time left, tasks.json, and the view of it on a terminal and on a pipe."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from engine_jobs import jobs
from excite.errors import TrainingStopped
from excite.jobs.progress import Noted, Tally
from excite.jobs.scheduler import complete
from excite.jobs.terminal import TaskView


def tally_of(tmp_path: Path, clock: Any = None) -> Tally:
    todo = jobs(tmp_path, "found", "a", "b", "c", "d")
    return Tally(todo, todo[1:], **({} if clock is None else {"clock": clock}))


def test_states_follow_what_engines_tell(tmp_path: Path) -> None:
    now = [0.0]
    tally = tally_of(tmp_path, lambda: now[0])
    assert str(tally) == "5 tasks: 1 done"
    assert tally.seconds_left() is None
    now[0] = 10.0
    for what in (("a-1", "starting", 0.0), ("a-1", "training", 0.5), ("b-2", "done", 1.0), ("c-3", "training", 0.25)):
        tally.tell(*what)
    assert {state: tally.count(state) for state in ("waiting", "running", "done", "failed")} == {
        "waiting": 1, "running": 2, "done": 2, "failed": 0
    }  # fmt: skip
    # 1.75 tasks in 10 s, 2.25 are left; the one that was found finished says nothing of the pace
    assert tally.seconds_left() == pytest.approx(2.25 / 1.75 * 10)
    tally.tell("c-3", "waiting", 0.0)  # its process was lost
    assert tally.count("waiting") == 2
    tally.tell("c-3", "failed: no memory", 0.0)
    tally.tell("c-3", "training", 0.9)  # a late message
    tally.tell("b-2", "training", 0.9)
    assert [entry.reason for entry in tally.of("failed")] == ["no memory"]
    assert str(tally) == "5 tasks: 1 running, 2 done, 1 failed, 10 s left"
    assert tally.done == pytest.approx(2.5)


def test_tasks_json_is_written_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    tally, kept = tally_of(tmp_path), []
    note = Noted(tally, tmp_path / "new", kept.append)
    note()
    tally.tell("a-1", "training", 0.5)
    note()  # too soon
    told = json.loads((tmp_path / "new/tasks.json").read_text())
    assert [task["state"] for task in told["tasks"]] == ["done", "waiting", "waiting", "waiting", "waiting"]
    note(ended=True)
    told = json.loads((tmp_path / "new/tasks.json").read_text())
    assert told["ended"]
    assert told["tasks"][1]["share"] == 0.5
    assert kept == ["tasks.json", "tasks.json"]
    (tmp_path / "file").write_text("")
    Noted(tally, tmp_path / "file")(ended=True)  # work goes on, seen or not


def test_on_a_pipe_a_line_now_and_then_and_a_table_of_what_failed(tmp_path: Path) -> None:
    out = io.StringIO()
    tally = tally_of(tmp_path)
    with TaskView(Console(file=out, width=200), pause=1000.0) as show:
        show(tally)
        for step in range(50):
            tally.tell("a-1", "training", step / 50)
            show(tally)
        tally.tell("b-2", "failed: no [memory]", 0.0)
        show(tally)
    lines = out.getvalue().splitlines()
    assert lines[0] == "5 tasks: 1 done"
    assert lines[1].startswith("5 tasks: 1 running, 1 done, 1 failed")  # failures are said at once
    assert lines[-1] == f"failed: b-2: no [memory] (log: {tmp_path / 'logs/b-2.log'})"
    assert len(lines) <= 4


def test_on_a_terminal_the_running_tasks_with_their_shares(tmp_path: Path) -> None:
    out = io.StringIO()
    tally = tally_of(tmp_path)
    with TaskView(Console(file=out, width=200, force_terminal=True)) as show:
        tally.tell("a-1", "training", 0.25)
        tally.tell("b-2", "failed: no [memory]", 0.0)
        show(tally)
    text = out.getvalue()
    assert "5 tasks: 1 running, 1 done, 1 failed" in text
    assert [line.split() for line in text.splitlines() if line.startswith("b-2")] == [
        ["b-2", "no", "[memory]", str(tmp_path / "logs/b-2.log")]
    ]
    assert "25 %" in text
    assert "training" in text


def test_complete_shows_every_task_and_leaves_the_log_of_what_failed(tmp_path: Path) -> None:
    todo = jobs(tmp_path, "fine", "fails always", "fine")
    states: list[str] = []
    with pytest.raises(TrainingStopped, match="fails-always-1: a failure that stays"):
        complete(todo, 1, retries=0, show=lambda tally: states.append(str(tally).split(": ")[1].split(", ")[0]))
    assert states[0] == "none has begun"
    assert "1 running" in states
    told = json.loads((tmp_path / "tasks.json").read_text())
    assert [task["state"] for task in told["tasks"]] == ["done", "failed", "done"]
    assert told["ended"]
    log = Path(told["tasks"][1]["log"])
    assert "RuntimeError: a failure that stays" in log.read_text()  # also without worker processes
