"""The process that reads databases of others, over a pipe."""

from __future__ import annotations

import sqlite3
import threading
from array import array
from multiprocessing import Pipe
from pathlib import Path

from excite.runs.reader.script import columns, serve


def test_columns_are_bytes_of_steps_values_and_missing() -> None:
    steps, values, missing = columns([(1, 0.5, 0), (2, 0.0, 1)])
    assert (array("q", steps).tolist(), array("d", values).tolist(), list(missing)) == ([1, 2], [0.5, 0.0], [0, 1])
    assert columns([]) == (b"", b"", b"")


def test_it_opens_answers_and_reports_errors(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.db") as database:
        database.execute("CREATE TABLE t (a)")
        database.execute("INSERT INTO t VALUES (7)")
    ours, theirs = Pipe()
    thread = threading.Thread(target=serve, args=(theirs,))
    thread.start()
    ours.send((1, 5.0, "open", (f"file:{tmp_path / 'a.db'}?mode=ro", 1.0, 1000)))
    assert ours.recv() == ("end", None)
    ours.send((1, 5.0, "query", [("SELECT a FROM t", (), False)]))
    assert ours.recv() == ("end", [[(7,)]])
    ours.send((1, 5.0, "query", [("SELECT b FROM t", (), False)]))
    kind, error = ours.recv()
    assert kind == "error"
    assert "no such column" in str(error)
    ours.send((1, 5.0, "close", None))
    assert ours.recv() == ("end", None)
    ours.close()
    thread.join(10)
    assert not thread.is_alive()
