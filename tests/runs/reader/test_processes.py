"""Databases read in another process: the same numbers, and a crash there is an error here."""

import os
import shutil
import signal
import sqlite3

import numpy as np
import pytest

from excite import RunError
from excite.runs import Run
from excite.runs.reader import MetricsReader, read_overview
from excite.runs.reader import processes as readers
from excite.runs.reader.processes import Crashed, ReadElsewhere, Reader, Readers

pytestmark = pytest.mark.skipif(not readers.AVAILABLE, reason="files that are mapped cannot be shortened on Windows")


@pytest.fixture
def run(tmp_path):
    with Run.create(tmp_path / "run", {}) as run:
        log(run, range(300))
        yield run


def log(run, steps):
    for step in steps:
        run.log(step, {"loss/step": step / 7, "rank/share/é": float("nan") if step % 7 == 3 else step / 100})
    run.flush()


def address(run):
    return f"{(run.path / 'metrics.db').as_uri()}?mode=ro"


def test_the_numbers_are_those_read_in_this_process(run):
    here, elsewhere = MetricsReader(run.path), MetricsReader(run.path, reader=Reader())
    for steps in (range(300, 310), range(310, 600)):
        log(run, steps)
        assert (here.refresh(), here.names(), here.last()) == (elsewhere.refresh(), elsewhere.names(), elsewhere.last())
        assert here.latest("loss/step") == elsewhere.latest("loss/step")
        for name in ("loss/step", "rank/share/é", "nothing"):
            for one, other in zip(here.series(name), elsewhere.series(name)):
                np.testing.assert_array_equal(one, other)
                assert one.dtype == other.dtype
    fresh = MetricsReader(run.path, reader=Reader())
    for one, other in zip(MetricsReader(run.path).subsample("loss/step", 20), fresh.subsample("loss/step", 20)):
        np.testing.assert_array_equal(one, other)
    assert read_overview(run.path, ["loss/step"], reader=Reader()) == read_overview(run.path, ["loss/step"])


def test_the_first_process_can_be_started_in_advance(run):
    several = Readers(2)
    several.start()
    several.start()
    first, second = several.assign(), several.assign()
    assert (first.running, first.starts, second.running) == (True, 1, False)
    MetricsReader(run.path, reader=first).close()
    assert first.starts == 1


@pytest.mark.slow
def test_long_series_come_in_parts(run):
    database = sqlite3.connect(run.path / "metrics.db", isolation_level=None)
    database.execute(
        "INSERT INTO metrics WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 250000) "
        "SELECT 'long', i, CASE WHEN i % 3 THEN i * 0.1 END, 0.0 FROM n"
    )
    database.close()
    for one, other in zip(
        MetricsReader(run.path).series("long"), MetricsReader(run.path, reader=Reader()).series("long")
    ):
        np.testing.assert_array_equal(one, other)
        assert len(one) == 250_001


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_shortened_shared_memory_does_not_end_this_process(run, size, tmp_path):
    hostile, reader = tmp_path / "hostile", Reader()
    hostile.mkdir()
    for name in ("metrics.db", "metrics.db-wal"):  # of a killed process; nobody but the reader maps the shared memory
        shutil.copy(run.path / name, hostile)
    metrics_reader, innocent = MetricsReader(hostile, reader=reader), MetricsReader(run.path, reader=reader)
    metrics_reader.refresh()
    innocent.refresh()
    innocent.series("loss/step")
    os.truncate(hostile / "metrics.db-shm", size)
    for _ in range(3):  # after the first crash without another try
        with pytest.raises(RunError, match=f"ended by signal {signal.SIGBUS.value}") as error:
            metrics_reader.refresh()
            metrics_reader.series("loss/step")
        assert "metrics.db" in str(error.value)
        assert "\n" not in str(error.value)
    log(run, range(300, 309))
    innocent.refresh()
    assert innocent.series("loss/step")[0].tolist() == list(range(309))
    assert reader.starts == 2


def test_a_process_that_does_not_answer_is_ended(run, monkeypatch):
    reader = Reader()
    metrics_reader = MetricsReader(run.path, reader=reader)
    os.kill(reader._process.pid, signal.SIGSTOP)
    monkeypatch.setattr(readers, "_GRACE", -1e9)
    with pytest.raises(RunError, match="does not answer"):
        metrics_reader.refresh()
    monkeypatch.undo()
    assert not reader.running
    assert MetricsReader(run.path, reader=reader).refresh() == 1


def test_errors_of_the_database_come_as_they_are(run):
    elsewhere = ReadElsewhere(Reader(), address(run), 1.0, 5.0)
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        elsewhere.execute("SELECT * FROM missing_table")
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        elsewhere.execute("DROP TABLE metrics")
    elsewhere.seconds = -1.0
    endless = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    with pytest.raises(sqlite3.OperationalError) as error:
        elsewhere.execute(endless)
    assert error.value.sqlite_errorcode == sqlite3.SQLITE_INTERRUPT
    with pytest.raises(TypeError):
        elsewhere.execute_together(("SELECT name, 0.0, 0 FROM metrics", ()), array=0)
    elsewhere.close()


def test_what_was_open_in_a_process_that_ended_is_lost(run):
    reader = Reader()
    elsewhere = ReadElsewhere(reader, address(run), 1.0, 5.0)
    reader._process.kill()
    with pytest.raises(Crashed, match="ended by signal 9"):
        elsewhere.execute("SELECT 1")
    assert elsewhere.ended
    with pytest.raises(Crashed):
        elsewhere.execute("SELECT 1")
    elsewhere.close()
    assert ReadElsewhere(reader, address(run), 1.0, 5.0).execute("SELECT 1").fetchone() == (1,)
