"""A run followed while it is written: the same numbers as a fresh look at it, also after a resume."""

import os
import shutil
import sqlite3

import numpy as np
import pytest

from excite import RunError, load_run
from excite._core.files import read_json
from excite.runs import Run
from excite.runs.reader import MetricsReader, read_overview, read_status


def same(metrics_reader, path):
    metrics_reader.refresh()
    with load_run(path) as run:
        assert metrics_reader.names() == run.names()
        for name in run.names():
            for ours, theirs in zip(metrics_reader.series(name), run.series(name)):
                np.testing.assert_array_equal(ours, theirs)


def log(run, steps, shift=0.0):
    for step in steps:
        run.log(step, {"loss/step": step + shift, "rank/share/é": float("nan") if step % 7 == 3 else step / 100})
        if step % 5 == 0:
            run.log(step, {f"late/{step // 50}": float("inf")})
    run.flush()


def test_what_is_new_is_read_and_what_was_read_is_kept(tmp_path):
    with Run.create(tmp_path / "run", {}) as run:
        metrics_reader = MetricsReader(tmp_path / "run")
        same(metrics_reader, tmp_path / "run")
        assert metrics_reader.last() is None
        versions = set()
        for start in (0, 40, 41, 100):
            log(run, range(start, start + 40))
            same(metrics_reader, tmp_path / "run")
            versions.add(metrics_reader.version)
            assert metrics_reader.refresh() == metrics_reader.version  # nothing new: nothing changes
        assert len(versions) == 4
        assert metrics_reader.last()[0] == 139
        assert metrics_reader.latest("loss/step") == 139
        assert metrics_reader.latest("nothing") is None
        assert metrics_reader.series("nothing")[0].size == 0
        assert metrics_reader.points >= 139
        metrics_reader.close()


def test_a_resumed_run_is_read_anew_where_it_was_written_anew(tmp_path):
    path = tmp_path / "run"
    with Run.create(path, {}) as run:
        log(run, range(50))
        metrics_reader = MetricsReader(path)
        same(metrics_reader, path)
        run.rewind(20)
        log(run, range(21, 50), shift=0.5)  # as many as before, other values
        same(metrics_reader, path)
        run.rewind(10)
        run.flush()
        same(metrics_reader, path)
        log(run, range(11, 90), shift=0.25)
        same(metrics_reader, path)
    metrics_reader.close()


def test_a_folder_made_anew_is_read_anew(tmp_path):
    path = tmp_path / "run"
    with Run.create(path, {}) as run:
        log(run, range(50))
    metrics_reader = MetricsReader(path)
    same(metrics_reader, path)
    shutil.rmtree(path)
    with pytest.raises(RunError):
        metrics_reader.refresh()
    with Run.create(path, {}) as run:
        run.log(0, {"other": 1.0})
    same(metrics_reader, path)
    metrics_reader.close()


def test_a_sketch_is_made_of_true_points(tmp_path):
    path = tmp_path / "run"
    with Run.create(path, {}) as run:
        for step in range(0, 9000, 3):
            run.log(
                step, {"a": float("nan") if step == 0 else step**2, "b": 1.0} if step % 300 == 0 else {"a": step**2}
            )
    metrics_reader = MetricsReader(path)
    metrics_reader.refresh()
    steps, values = metrics_reader.subsample("a", 100)
    assert 90 <= len(steps) <= 100
    assert (steps[0], steps[-1]) == (0, 8997)
    assert np.isnan(values[0])
    np.testing.assert_array_equal(values[1:], steps[1:] ** 2)
    assert metrics_reader.points == 0  # nothing was kept
    assert len(metrics_reader.subsample("b", 100)[0]) == 30  # short ones are read
    assert len(metrics_reader.subsample("nothing")[0]) == 0
    metrics_reader.series("a")
    assert len(metrics_reader.subsample("a", 100)[0]) == 3000
    metrics_reader.close()


def test_a_subsample_takes_few_queries(tmp_path, monkeypatch):
    """A query per point would go to another process and back a thousand times before the first curve is drawn."""
    with Run.create(tmp_path / "run", {}) as run:
        for step in range(2000):
            run.log(step, {"a": step})
    metrics_reader = MetricsReader(run.path)
    asked, ask = [], metrics_reader._execute
    monkeypatch.setattr(metrics_reader, "_execute", lambda *query: asked.append(query) or ask(*query))
    steps, values = metrics_reader.subsample("a", 101)
    np.testing.assert_array_equal(steps, np.linspace(0, 1999, 101).astype(int))
    np.testing.assert_array_equal(values, steps)
    assert len(asked) < 10
    metrics_reader.close()


def test_how_a_run_stands(tmp_path):
    path = tmp_path / "run"
    run = Run.create(path, {})
    assert read_status(path) == ("running", None)
    run._lock.release()  # as if killed
    assert read_status(path)[0] == "stale"
    run.close("failed", "out of memory")
    assert read_status(path) == ("failed", "out of memory")


@pytest.mark.parametrize("content", [b"", b"not a database" * 100, None])
def test_what_is_no_database_of_ours_is_refused(tmp_path, content):
    path = tmp_path / "run"
    Run.create(path, {}).close()
    os.remove(path / "metrics.db")
    if content is not None:
        (path / "metrics.db").write_bytes(content)
    with pytest.raises(RunError):
        MetricsReader(path)
    other = sqlite3.connect(path / "metrics.db") if content is None else None
    if other is not None:
        other.execute("CREATE TABLE metrics (a)")
        other.close()
        with pytest.raises(RunError, match="not a metrics database of Excite"):
            MetricsReader(path)


def test_stretches_of_a_long_series_are_those_of_its_values(tmp_path, monkeypatch):
    monkeypatch.setattr("excite.runs.reader.metrics_reader._LONG", 1000)
    rng = np.random.default_rng(0)
    values = rng.standard_normal(5000)
    values[[7, 4000]], values[600:900] = np.inf, np.nan
    with Run.create(tmp_path / "run", {}) as run:
        for step, value in enumerate(values):
            run.log(3 * step + 5, {"loss/step": value, **({"short": value} if step < 900 else {})})
    metrics_reader = MetricsReader(tmp_path / "run")
    metrics_reader.refresh()
    for low, high in ((None, None), (1000.5, 9000.0)):
        first, last, smallest, mean, largest = metrics_reader.binned("loss/step", 50, low, high)
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
    assert metrics_reader.binned("short", 50) is None
    assert metrics_reader.binned("nothing", 50) is None
    metrics_reader.series("loss/step")
    assert metrics_reader.binned("loss/step", 50) is None, "what was read is not asked for again"
    metrics_reader.close()


def make(path, steps=20, names=1):
    with Run.create(path, {}) as run:
        for step in range(steps):
            run.log(step, {"loss/step": 1.0 / (step + 1), **{f"rank/share/{i}": 0.5 for i in range(names)}})
    return path


def sql(path, *statements):
    with sqlite3.connect(path / "metrics.db") as database:
        for statement in statements:
            database.execute(statement)
    database.close()


def in_place(path, kind):
    """Something else than a regular file."""
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        (path.parent.parent / "elsewhere").write_text("{}")
        path.symlink_to(path.parent.parent / "elsewhere")


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n)"
DAMAGED = {
    "text for a value": ["UPDATE metrics SET value = 'text' WHERE name = 'loss/step'"],
    "text for a step": ["INSERT INTO metrics VALUES ('loss/step', 'text', 0.0, 0.0)"],
    "bytes for a name": ["INSERT INTO metrics VALUES (x'00ff', 0, 0.0, 0.0)"],
    "a name that is no text": ["INSERT INTO metrics VALUES (CAST(x'ff' AS TEXT), 0, 0.0, 0.0)"],
    "a long name": ["INSERT INTO metrics VALUES (hex(zeroblob(100000)), 0, 0.0, 0.0)"],
    "an infinite time": ["UPDATE metrics SET time = 9e999"],
    "a time that is no date": ["UPDATE metrics SET time = 1e300"],
    "text for a time": ["UPDATE metrics SET time = 'text'"],
    "steps below zero": ["UPDATE metrics SET step = step - 1000"],
    "no table": ["DROP TABLE metrics"],
    "another table": ["DROP TABLE metrics", "CREATE TABLE metrics (a)"],
    "a view": ["DROP TABLE metrics", f"CREATE VIEW metrics AS {ENDLESS} SELECT i AS name, 0 AS step, 0 AS value, 0 AS time FROM n"],
    "a virtual table": ["DROP TABLE metrics", "CREATE VIRTUAL TABLE metrics USING fts5(name, step, value, time)"],
    "a computed column": ["DROP TABLE metrics", "CREATE TABLE metrics (name TEXT, step INTEGER, value AS (hex(zeroblob(step))), time REAL, "
                          "PRIMARY KEY (name, step)) WITHOUT ROWID"],
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_metrics_are_an_error_in_one_line(kind, tmp_path):
    path = make(tmp_path / "run")
    sql(path, *DAMAGED[kind])
    with pytest.raises(RunError, match=r"metrics\.db") as error:
        metrics_reader = MetricsReader(path, tmp_path)
        metrics_reader.refresh()
        metrics_reader.last()
        metrics_reader.latest("loss/step")
        metrics_reader.series("loss/step")
    assert "\n" not in str(error.value)
    if kind in ("bytes for a name", "a name that is no text"):  # it reads no names
        return
    with pytest.raises(RunError, match=r"metrics\.db"):
        read_overview(path, ["loss/step"], below=tmp_path)


@pytest.mark.parametrize("kind", ["fifo", "folder", "link"])
@pytest.mark.parametrize("file", ["run.json", "metrics.db"])
def test_only_regular_files_are_opened(file, kind, tmp_path):
    path = make(tmp_path / "run")
    in_place(path / file, kind)
    read = (lambda: read_status(path, tmp_path)) if file == "run.json" else (lambda: MetricsReader(path, tmp_path))
    with pytest.raises(RunError, match="not a regular file"):
        read()
    if file == "metrics.db":
        with pytest.raises(RunError, match="not a regular file"):
            read_overview(path, ["loss/step"], below=tmp_path)


@pytest.mark.parametrize("file", ["metrics.db-wal", "metrics.db-shm", "metrics.db-journal"])
def test_what_lies_beside_the_database_is_a_regular_file(file, tmp_path):
    path = make(tmp_path / "run")
    (path / file).unlink(missing_ok=True)
    os.mkfifo(path / file)
    with pytest.raises(RunError, match="not a regular file"):
        MetricsReader(path, tmp_path)
    with pytest.raises(RunError, match="not a regular file"):
        read_overview(path, ["loss/step"], below=tmp_path)


def test_nobody_waits_for_a_fifo_in_place_of_a_lock(tmp_path):
    path = make(tmp_path / "run")
    (path / "lock").unlink()
    os.mkfifo(path / "lock")
    (path / "run.json").write_text((path / "run.json").read_text().replace('"done"', '"running"'))
    assert read_status(path) == ("stale", "its process ended without saying so")


def test_links_are_followed_only_above_the_given_folder(tmp_path):
    make(tmp_path / "there/run")
    (tmp_path / "here").symlink_to(tmp_path / "there")
    assert read_status(tmp_path / "here/run", tmp_path / "here")[0] == "done"
    with pytest.raises(RunError, match="symbolic links"):
        read_status(tmp_path / "here/run", tmp_path)
    assert read_status(tmp_path / "here/run")[0] == "done"  # without it, all are


def test_large_files_are_refused(tmp_path):
    (tmp_path / "a.json").write_text("[" + "1," * 1000 + "1]")
    assert len(read_json(tmp_path / "a.json", max_bytes=2003)) == 1001
    with pytest.raises(RunError, match="more than 2,002 bytes"):
        read_json(tmp_path / "a.json", max_bytes=2002)


def test_queries_have_a_time_limit(tmp_path):
    path = make(tmp_path / "run", 1, names=3000)
    assert len(read_names(MetricsReader(path))) == 3001
    slow = MetricsReader(path, seconds=-1.0)  # over before it begins
    for _ in range(2):  # the second time without asking the database
        with pytest.raises(RunError, match="took longer than"):
            slow.refresh()
    with pytest.raises(RunError, match="took longer than"):
        read_overview(path, ["loss/step"], seconds=-1.0)


def _found(overview):
    return overview.step, overview.updated, overview.latest.get("loss/step")


def read_names(metrics_reader):
    metrics_reader.refresh()
    return metrics_reader.names()


def test_the_last_values_read_at_once_are_those_of_a_reader(tmp_path):
    def check(path):
        metrics_reader = MetricsReader(path)
        metrics_reader.refresh()
        last = metrics_reader.last() or (None, None)
        assert _found(read_overview(path, ["loss/step"], below=tmp_path)) == (*last, metrics_reader.latest("loss/step"))
        with load_run(path) as run:
            rows = run.frame()
        assert last[0] == (None if rows.empty else rows["step"].max())

    with Run.create(tmp_path / "run", {}) as run:
        check(tmp_path / "run")
        log(run, range(40))
        check(tmp_path / "run")  # from the log beside the database
        run.log(41, {"other": 1.0})
        run.flush()
        check(tmp_path / "run")
    check(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    check(tmp_path / "copy")
