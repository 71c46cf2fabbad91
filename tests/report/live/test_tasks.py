"""The live page on sweeps and studies: tasks that run, are done and failed, as they come."""

import json
import os
import time

import pytest

from excite.report.live.tasks import sweeps
from excite.runs.lock import Lock

from .conftest import EVIL, make_run


def entry(name, state, share=0.0, reason=None, log="logs/x.log"):
    return {"name": name, "arm": name, "seed": 0, "log": log, "state": state, "phase": "training", "share": share,
            "reason": reason, "found": False}  # fmt: skip


def note(folder, *tasks, ended=False, updated=None, **more):
    folder.mkdir(parents=True, exist_ok=True)
    told = {"format": "excite-tasks", "updated": time.time() if updated is None else updated, "ended": ended,
            "seconds_left": 90.0, "tasks": list(tasks), **more}  # fmt: skip
    (folder / "tasks.json").write_text(json.dumps(told))


def test_sweeps_below_a_folder(tmp_path):
    note(tmp_path / "a/first", entry("x-0", "running", 0.5), entry("x-1", "done", 1.0), entry("x-2", "waiting"),
         entry("x-3", "failed", reason="no memory", log=f"{tmp_path}/a/first/logs/x-3.log"))  # fmt: skip
    lock = Lock(tmp_path / "a/first/lock", tmp_path / "a/first")
    note(tmp_path / "ended", entry("x-0", "done", 1.0), ended=True, updated=5.0)
    note(tmp_path / "failed", entry("x-0", "failed", reason="why"), ended=True, updated=4.0)
    note(tmp_path / "copy", entry("x-0", "running", 0.5), updated=3.0)  # of another machine, long ago
    make_run(tmp_path / "run")
    note(tmp_path / "run", entry("x-0", "done"))  # a run is not a sweep
    os.symlink(tmp_path / "ended/tasks.json", tmp_path / "tasks.json")
    first, ended, failed, copy = sweeps(tmp_path)
    assert first["label"] == "a/first"
    assert first["state"] == "running"
    assert first["counts"] == {"waiting": 1, "running": 1, "done": 1, "failed": 1}
    assert (first["done"], first["total"], first["left"]) == (1.5, 4, 90.0)
    assert [task["name"] for task in first["running"]] == ["x-0"]
    assert first["failed"][0]["log"] == "a/first/logs/x-3.log"
    assert (ended["state"], failed["state"], copy["state"]) == ("done", "failed", "stopped")
    assert copy["left"] is None
    lock.release()
    assert sweeps(tmp_path)[0]["state"] == "stopped"  # killed


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "excite-tasks"}', "\x00", '{"format": "other", "tasks": []}']
)
def test_files_that_are_not_ours_are_left_out(text, tmp_path):
    (tmp_path / "tasks.json").write_text(text)
    assert sweeps(tmp_path) == []
    note(tmp_path, entry("x-0", "running", float("nan")))
    assert sweeps(tmp_path) == []


def test_the_server_answers_with_them(tmp_path, serve):
    note(tmp_path / "sweep", entry(EVIL, "failed", reason=EVIL), ended=True)
    status, headers, text = serve(tmp_path).ask("/api/tasks")
    assert status == 200
    assert headers["content-type"] == "application/json"
    assert json.loads(text)["sweeps"][0]["failed"][0]["reason"] == EVIL


@pytest.mark.slow
@pytest.mark.browser
def test_the_page_shows_tasks_as_they_come(tmp_path, serve, browser_page):
    note(tmp_path / "sweep", entry("lr-0.1-0", "running", 0.25), entry("lr-1-0", "waiting"))
    lock = Lock(tmp_path / "sweep/lock", tmp_path / "sweep")
    browser_page.goto(serve(tmp_path).url)
    box = browser_page.locator(".sweep")
    box.get_by_text("2 tasks: 1 running, 1 waiting; about 2 min left").wait_for()
    box.get_by_text("lr-0.1-0: training, 25 %").wait_for()
    note(tmp_path / "sweep", entry("lr-0.1-0", "done", 1.0), entry("lr-1-0", "failed", reason=EVIL), ended=True)
    lock.release()
    box.get_by_text("2 tasks: 1 done, 1 failed").wait_for()
    box.get_by_text(f"lr-1-0 failed: {EVIL} (log: logs/x.log)").wait_for()
    assert browser_page.problems == []
