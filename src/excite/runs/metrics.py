"""The metrics of a run: a table of step, name and value in SQLite.

The database is in WAL mode, so that others read while one process writes. The primary key is (name, step): a step that
is replayed after a resume overwrites itself. SQLite has no NaN; it is stored as NULL and comes back as NaN. The sign
of a zero is lost, every other value comes back exactly.

The table `commits` counts the transactions. Checkpoints record the count: a database that has lost its log (metrics.db-wal) or
was restored from an older copy has a smaller one.
"""

from __future__ import annotations

import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from excite.errors import RunError
from excite.runs.checks import MAX_STEP, check_metrics, check_step, check_version

APPLICATION = 0x45584354  # "EXCT" in the header of the file: written by Excite
VERSION = 1
_FLUSH_COUNT, _FLUSH_SECONDS = 4096, 1.0
_PATIENCE = 30  # seconds to wait for a locked database
_SCHEMA = """
CREATE TABLE metrics (
    name TEXT NOT NULL, step INTEGER NOT NULL, value REAL, time REAL NOT NULL, PRIMARY KEY (name, step)
) WITHOUT ROWID
"""


_INSERT = "INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)"
_BRIEFLY = 0.5  # seconds to wait for a locked database where values can wait in memory instead
_PAUSE, _MAX_PAUSE = 2.0, 60.0  # seconds before the next try, doubled each time
_MAX_WAITING = 200_000  # values kept in memory meanwhile
_COUNT = "UPDATE commits SET count = count + 1"
_THIN = """
DELETE FROM metrics WHERE step < :before AND EXISTS (
    SELECT 1 FROM metrics AS earlier
    WHERE earlier.name = metrics.name AND earlier.step < metrics.step AND earlier.step >= metrics.step / :every * :every
)
"""
_Row = tuple[str, int, float, float]
# What is wrong with the values of a row, not with the database.
_REFUSED = (
    OverflowError, UnicodeError, sqlite3.DataError, sqlite3.IntegrityError, sqlite3.InterfaceError, sqlite3.ProgrammingError
)  # fmt: skip


class Busy(RunError):
    """Another process holds the database: it may be free a moment later."""


class MetricsTable:
    """Write with `log`, read with `rows`, `series` and `names`. Values wait in memory for at most a second or so."""

    def __init__(self, path: Path, mode: Literal["r", "a", "x"], commits: int = 0) -> None:
        self.path = path
        self._writes = mode != "r"
        self._buffer: dict[tuple[str, int], tuple[float, float]] = {}
        self._flushed = time.monotonic()
        self._lock = threading.RLock()
        self._pause, self._retry_at, self._dropped = 0.0, 0.0, 0  # while the database is locked
        self._patient = False  # inside `patience`
        self._connection: sqlite3.Connection | None = None
        if mode != "x" and not path.is_file():
            raise RunError(f"{path} is missing: `excite repair {path.parent}` starts a new table")
        try:
            with self._guard():
                self._connection = _read_only(path) if mode == "r" else _connect(path)
                if mode == "x":
                    self._connection.execute(_SCHEMA)
                    self._connection.execute(f"PRAGMA application_id = {APPLICATION}")
                    self._connection.execute(f"PRAGMA user_version = {VERSION}")
                else:
                    self._check()
                if self._writes and not self._counts():
                    with self._connection as connection:
                        connection.execute("BEGIN IMMEDIATE")
                        connection.execute("CREATE TABLE commits (count INTEGER NOT NULL)")
                        connection.execute("INSERT INTO commits VALUES (?)", (commits,))
        except BaseException:
            if self._connection is not None:
                self._connection.close()
            raise

    def _check(self) -> None:
        if self._pragma("application_id") != APPLICATION:
            raise RunError(f"{self.path} is not a metrics database of Excite")
        check_version(self.path, self._pragma("user_version"), VERSION)
        answer = self._pragma("quick_check(1)")
        if answer != "ok":
            raise RunError(f"{self.path} is damaged ({str(answer).splitlines()[-1]}): {self._remedy()}")

    def _pragma(self, name: str) -> Any:
        return self._require_open().execute(f"PRAGMA {name}").fetchone()[0]

    def _require_open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise RunError(f"{self.path.parent} is closed: open the run again")
        return self._connection

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """SQLite's errors in one line."""
        try:
            with self._lock:
                yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error) or "busy" in str(error):
                raise Busy(f"{self.path} is locked by another process: {error}") from error
            raise RunError(f"cannot use {self.path}: {_advice(str(error))}") from error
        except sqlite3.DatabaseError as error:
            raise RunError(f"{self.path} is damaged ({error}): {self._remedy()}") from error

    def _remedy(self) -> str:
        return f"restore it from a copy, or `excite repair {self.path.parent}` saves what can be read"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Buffers values of one step, and writes them from time to time."""
        now = time.time()
        number = check_step(step)
        checked = {(name, number): (value, now) for name, value in check_metrics(values)}
        with self._lock:
            self._require_open()
            self._buffer.update(checked)
            if len(self._buffer) >= _FLUSH_COUNT or time.monotonic() - self._flushed > _FLUSH_SECONDS:
                if self._patient:
                    self.flush()
                else:
                    self._flush_if_free()

    def log_many(self, rows: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Values of several steps in one transaction: on the disk when this returns; if it raises, none of them is kept."""
        now = time.time()
        checked = {
            (name, check_step(step)): (value, now) for step, values in rows for name, value in check_metrics(values)
        }
        with self._lock:
            self._require_open()
            before = self._buffer
            self._buffer = before | checked
            try:
                self.flush()
            except BaseException:
                self._buffer = before
                raise

    def _flush_if_free(self) -> None:
        """Write what is buffered; while another process holds the database, it waits in memory."""
        if time.monotonic() < self._retry_at:
            return
        try:
            with self.patience(_BRIEFLY):
                self.flush()
        except Busy as error:
            first, self._pause = not self._pause, min(2 * self._pause or _PAUSE, _MAX_PAUSE)
            self._retry_at = time.monotonic() + self._pause
            while len(self._buffer) > _MAX_WAITING:
                self._buffer.pop(next(iter(self._buffer)))
                self._dropped += 1
            if first:
                warnings.warn(f"metrics wait in memory for now, training continues: {error}", stacklevel=4)

    def flush(self) -> None:
        """All that was logged, in one transaction: on the disk when this returns."""
        with self._guard():
            self._flushed = time.monotonic()
            if not self._buffer:
                return
            rows = [(name, step, value, wall) for (name, step), (value, wall) in self._buffer.items()]
            refused: list[str] = []
            try:
                self._insert(rows)
            except _REFUSED:
                refused = self._insert_each(rows)
            self._buffer.clear()
            waited, num_dropped = self._pause, self._dropped
            self._pause, self._retry_at, self._dropped = 0.0, 0.0, 0
        if waited:
            missing = f"; {num_dropped} values are lost" if num_dropped else ", nothing is lost"
            warnings.warn(f"metrics are written to {self.path} again{missing}", stacklevel=3)
        if refused:
            more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
            warnings.warn(f"{self.path} cannot hold {refused[0]}{more}: dropped, the rest is stored", stacklevel=3)

    def _insert(self, rows: list[_Row]) -> None:
        with self._require_open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(_INSERT, rows)
            connection.execute(_COUNT)

    def _insert_each(self, rows: list[_Row]) -> list[str]:
        """One by one, in one transaction; returns the rows that SQLite refuses, the others are stored."""
        refused: list[str] = []
        with self._require_open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            for row in rows:
                try:
                    connection.execute(_INSERT, row)
                except _REFUSED as error:
                    refused.append(f"{row[0]!r} at step {row[1]} ({error})")
            connection.execute(_COUNT)
        return refused

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Inside, wait for a locked database for so long only, and say so. Other threads have to wait until this is over."""
        with self._lock:
            patient, self._patient = self._patient, True
            if self._connection is not None:
                self._connection.execute(f"PRAGMA busy_timeout = {int(1000 * seconds)}")
            try:
                yield
            finally:
                self._patient = patient
                if self._connection is not None:
                    self._connection.execute(f"PRAGMA busy_timeout = {1000 * _PATIENCE}")

    def rewind(self, step: int) -> None:
        """Drop everything after `step`."""
        with self._guard():
            self._buffer = {key: value for key, value in self._buffer.items() if key[1] <= step}
            with self._require_open() as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("DELETE FROM metrics WHERE step > ?", (min(step, MAX_STEP),))
                connection.execute(_COUNT)

    def thin(self, before: int, every: int) -> int:
        """Of the steps before `before`, keep the first one of every `every` that each metric has; returns how many go."""
        with self._guard():
            self.flush()
            with self._require_open() as connection:
                connection.execute("BEGIN IMMEDIATE")
                removed = connection.execute(_THIN, {"before": before, "every": every}).rowcount
                connection.execute(_COUNT)
            with suppress(sqlite3.OperationalError):  # readers prevent it: the file stays as large as it was
                self._require_open().execute("VACUUM")
            return int(removed)

    @property
    def commits(self) -> int:
        """How often the metrics have been written; 0 where that was not counted yet."""
        with self._guard():
            if not self._counts():
                return 0
            return int(self._require_open().execute("SELECT max(count) FROM commits").fetchone()[0] or 0)

    def _counts(self) -> bool:
        """Whether commits are counted: a database of an older Excite has no table for that yet."""
        return self._require_open().execute("SELECT 1 FROM sqlite_master WHERE name = 'commits'").fetchone() is not None

    def set_commits(self, count: int) -> None:
        """Sets the number of commits."""
        with self._guard():
            self._require_open().execute("UPDATE commits SET count = ?", (count,))

    def last_step(self) -> int | None:
        """The last step at which anything was measured."""
        with self._guard():
            step = self._require_open().execute("SELECT max(step) FROM metrics").fetchone()[0]
            return None if step is None else int(step)

    def rows(self) -> list[tuple[int, str, float | None]]:
        """All (step, name, value), ordered by step, then name. NaN comes as None."""
        return self._query("SELECT step, name, value FROM metrics ORDER BY step, name")

    def series(self, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Returns steps and values of one metric."""
        rows = self._query("SELECT step, value FROM metrics WHERE name = ? ORDER BY step", (name,))
        return np.array([row[0] for row in rows], np.int64), np.array([row[1] for row in rows], np.float64)

    def names(self) -> list[str]:
        """Returns the names of all metrics."""
        return [row[0] for row in self._query("SELECT DISTINCT name FROM metrics ORDER BY name")]

    def _query(self, text: str, values: tuple[Any, ...] = ()) -> list[Any]:
        with self._guard():
            if self._buffer:
                self.flush()
            return self._require_open().execute(text, values).fetchall()

    def close(self) -> None:
        """Writes buffered values and closes the database."""
        with self._lock:
            try:
                if self._connection is not None:
                    self.flush()
                    if self._writes:  # so that metrics.db alone is complete; readers may keep the -wal file in place
                        with suppress(sqlite3.Error):
                            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                connection, self._connection = self._connection, None
                if connection is not None:
                    connection.close()


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # FULL: what `flush` wrote survives a power cut too, so that no checkpoint is ahead of its metrics.
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        connection.close()
        raise
    return connection


def _read_only(path: Path, patience: float = _PATIENCE, connect: Callable[[str], Any] | None = None) -> Any:
    """A connection for reading; `connect` makes one from an address."""
    address = path.absolute().as_uri()
    connect = connect or partial(
        sqlite3.connect, uri=True, timeout=patience, isolation_level=None, check_same_thread=False
    )
    connection = connect(f"{address}?mode=ro")
    try:
        connection.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.OperationalError:
        # WAL needs a shared-memory file beside the database; on a read-only disk it cannot be made, nor can anyone write.
        # Opened as immutable the -wal file is ignored, which is right only if there is nothing in it.
        connection.close()
        wal = path.with_name(path.name + "-wal")
        if wal.exists() and wal.stat().st_size:
            raise
        connection = connect(f"{address}?immutable=1")
    except BaseException:
        connection.close()
        raise
    return connection


def _advice(message: str) -> str:
    if "full" in message or "disk I/O" in message:
        return f"{message}: free some space and start again"
    if "readonly" in message or "unable to open" in message:
        return f"{message}: choose a folder you can write to"
    return message
