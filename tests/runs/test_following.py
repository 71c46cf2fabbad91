"""A run followed while it is written: the same numbers as a fresh look at it, also after a resume."""

import os
import shutil
import sqlite3

import numpy as np
import pytest

from excite import RunError, load_run
from excite.runs import Run
from excite.runs.following import Follower, standing


def same(follower, path):
    follower.refresh()
    with load_run(path) as run:
        assert follower.names() == run.names()
        for name in run.names():
            for ours, theirs in zip(follower.series(name), run.series(name)):
                np.testing.assert_array_equal(ours, theirs)


def log(run, steps, shift=0.0):
    for step in steps:
        run.log(step, {"loss/step": step + shift, "rank/share/é": float("nan") if step % 7 == 3 else step / 100})
        if step % 5 == 0:
            run.log(step, {f"late/{step // 50}": float("inf")})
    run.flush()


def test_what_is_new_is_read_and_what_was_read_is_kept(tmp_path):
    with Run.create(tmp_path / "run", {}) as run:
        follower = Follower(tmp_path / "run")
        same(follower, tmp_path / "run")
        assert follower.last() is None
        versions = set()
        for start in (0, 40, 41, 100):
            log(run, range(start, start + 40))
            same(follower, tmp_path / "run")
            versions.add(follower.version)
            assert follower.refresh() == follower.version  # nothing new: nothing changes
        assert len(versions) == 4
        assert follower.last()[0] == 139
        assert follower.latest("loss/step") == 139
        assert follower.latest("nothing") is None
        assert follower.series("nothing")[0].size == 0
        assert follower.points >= 139
        follower.close()


def test_a_resumed_run_is_read_anew_where_it_was_written_anew(tmp_path):
    path = tmp_path / "run"
    with Run.create(path, {}) as run:
        log(run, range(50))
        follower = Follower(path)
        same(follower, path)
        run.rewind(20)
        log(run, range(21, 50), shift=0.5)  # as many as before, other values
        same(follower, path)
        run.rewind(10)
        run.flush()
        same(follower, path)
        log(run, range(11, 90), shift=0.25)
        same(follower, path)
    follower.close()


def test_a_folder_made_anew_is_read_anew(tmp_path):
    path = tmp_path / "run"
    with Run.create(path, {}) as run:
        log(run, range(50))
    follower = Follower(path)
    same(follower, path)
    shutil.rmtree(path)
    with pytest.raises(RunError):
        follower.refresh()
    with Run.create(path, {}) as run:
        run.log(0, {"other": 1.0})
    same(follower, path)
    follower.close()


def test_a_sketch_is_made_of_true_points(tmp_path):
    path = tmp_path / "run"
    with Run.create(path, {}) as run:
        for step in range(0, 9000, 3):
            run.log(
                step, {"a": float("nan") if step == 0 else step**2, "b": 1.0} if step % 300 == 0 else {"a": step**2}
            )
    follower = Follower(path)
    follower.refresh()
    steps, values = follower.sketch("a", 100)
    assert 90 <= len(steps) <= 100
    assert (steps[0], steps[-1]) == (0, 8997)
    assert np.isnan(values[0])
    np.testing.assert_array_equal(values[1:], steps[1:] ** 2)
    assert follower.points == 0  # nothing was kept
    assert len(follower.sketch("b", 100)[0]) == 30  # short ones are read
    assert len(follower.sketch("nothing")[0]) == 0
    follower.series("a")
    assert len(follower.sketch("a", 100)[0]) == 3000
    follower.close()


def test_how_a_run_stands(tmp_path):
    path = tmp_path / "run"
    run = Run.create(path, {})
    assert standing(path) == ("running", None)
    run._lock.release()  # as if killed
    assert standing(path)[0] == "stale"
    run.close("failed", "out of memory")
    assert standing(path) == ("failed", "out of memory")


@pytest.mark.parametrize("content", [b"", b"not a database" * 100, None])
def test_what_is_no_database_of_ours_is_refused(tmp_path, content):
    path = tmp_path / "run"
    Run.create(path, {}).close()
    os.remove(path / "metrics.db")
    if content is not None:
        (path / "metrics.db").write_bytes(content)
    with pytest.raises(RunError):
        Follower(path)
    other = sqlite3.connect(path / "metrics.db") if content is None else None
    if other is not None:
        other.execute("CREATE TABLE metrics (a)")
        other.close()
        with pytest.raises(RunError, match="not a metrics database of Excite"):
            Follower(path)


def test_stretches_of_a_long_series_are_those_of_its_values(tmp_path, monkeypatch):
    monkeypatch.setattr("excite.runs.following._LONG", 1000)
    rng = np.random.default_rng(0)
    values = rng.standard_normal(5000)
    values[[7, 4000]], values[600:900] = np.inf, np.nan
    with Run.create(tmp_path / "run", {}) as run:
        for step, value in enumerate(values):
            run.log(3 * step + 5, {"loss/step": value, **({"short": value} if step < 900 else {})})
    follower = Follower(tmp_path / "run")
    follower.refresh()
    for low, high in ((None, None), (1000.5, 9000.0)):
        first, last, smallest, mean, largest = follower.stretches("loss/step", 50, low, high)
        assert len(first) <= 50 + 1
        steps = 3 * np.arange(5000) + 5
        inside = (
            (steps >= (0 if low is None else low)) & (steps <= (1e9 if high is None else high)) & np.isfinite(values)
        )
        assert first[0] <= steps[inside][0]
        assert last[-1] >= steps[inside][-1]
        for i in range(len(first)):
            part = values[(steps >= first[i]) & (steps <= last[i]) & np.isfinite(values)]
            assert (smallest[i], largest[i]) == (part.min(), part.max())
            assert mean[i] == pytest.approx(part.mean())
    assert follower.stretches("short", 50) is None
    assert follower.stretches("nothing", 50) is None
    follower.series("loss/step")
    assert follower.stretches("loss/step", 50) is None, "what was read is not asked for again"
    follower.close()
