"""Runs of a store on the live page."""

import time

from excite.report.live.mirroring import mirrored
from excite.report.live.tasks import sweeps
from excite.runs.store import Store

from .conftest import make_run
from .test_tasks import entry, note


def test_runs_at_a_url_are_fetched_as_they_come(tmp_path, monkeypatch):
    monkeypatch.setenv("EXCITE_SCRATCH", str(tmp_path / "scratch"))
    store = Store(f"file://{tmp_path}/store")
    make_run(tmp_path / "store/sweep/a")
    with mirrored(store.url, pause=0.05) as folder:
        assert (folder / "sweep/a/metrics.db").is_file()
        make_run(tmp_path / "store/sweep/b")
        note(tmp_path / "store/sweep", entry("b", "running", 0.5))
        deadline = time.monotonic() + 240
        while not (folder / "sweep/b/run.json").exists() or not sweeps(folder):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    with mirrored(tmp_path) as folder:
        assert folder == tmp_path
