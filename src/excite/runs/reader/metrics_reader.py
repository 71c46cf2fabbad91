"""Follow a run while another process writes it: what is new is read, what was read is kept."""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from excite._core.files import open_regular, read_json
from excite.errors import RunError
from excite.runs.checks import check_version
from excite.runs.folder import FORMAT, STATUSES, VERSION
from excite.runs.lock import is_held
from excite.runs.metrics import APPLICATION, _read_only
from excite.runs.reader.processes import AVAILABLE, MAX_TEXT, ROW, Crashed, ReadElsewhere, Reader, Rows

Steps = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]
Execute = Callable[..., Any]  # (SQL, values) to a cursor
Result = TypeVar("Result")

# All names by one search each in the primary key (name, step), instead of a walk over every row.
MAX_NAMES = 200_000
_SKIP_SCAN = f"""
WITH RECURSIVE every(name) AS (
    SELECT (SELECT min(name) FROM metrics)
    UNION ALL SELECT (SELECT min(name) FROM metrics WHERE name > every.name) FROM every WHERE every.name IS NOT NULL
    LIMIT {MAX_NAMES + 2}
)"""
_NAMES = f"{_SKIP_SCAN} SELECT name FROM every WHERE name IS NOT NULL"
# The last step and the last time of any name, by two more searches per name.
LAST = f"""
{_SKIP_SCAN}, ends(name, step) AS (
    SELECT name, (SELECT max(step) FROM metrics WHERE name = every.name) FROM every WHERE name IS NOT NULL
) SELECT max(step), max((SELECT time FROM metrics AS row WHERE row.name = ends.name AND row.step = ends.step)) FROM ends
"""
_LATEST = "SELECT value FROM metrics WHERE name = ? ORDER BY step DESC LIMIT 1"
_TIME = "SELECT time FROM metrics WHERE name = ? AND step = ?"
_LAST_TIME = "SELECT time FROM metrics WHERE name = ? ORDER BY step DESC LIMIT 1"
_COLUMNS = [("name", 1, 0), ("step", 2, 0), ("value", 0, 0), ("time", 0, 0)]  # (name, place in the primary key, hidden)
_LONG = 50_000  # points
_MAX_SERIES = 16_000_000  # points
_AFTER = (
    "SELECT step, ifnull(value, 0.0), value IS NULL FROM metrics WHERE name = ? AND step > ? ORDER BY step"
    f" LIMIT {_MAX_SERIES}"
)
# The first value at or after each of `count` steps at even distances from `low` to `high`: one search each, in one query.
_SUBSAMPLE = """
WITH RECURSIVE series(id, low, high, count) AS (VALUES (?, ?, ?, ?)),
places(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM places, series WHERE i + 1 < count)
SELECT step, ifnull(value, 0.0), value IS NULL FROM series CROSS JOIN places CROSS JOIN metrics
WHERE name = id AND step = (
    SELECT min(step) FROM metrics
    WHERE name = id AND step >= min(high, low + CAST((high - low) * (1.0 * i / max(count - 1, 1)) AS INTEGER))
)"""
_BUSY_SECONDS = 2.0  # a page would rather say that the database is busy than wait
_QUERY_SECONDS = 5.0  # for all queries of one call
_RETRY_SECONDS = 60.0  # a database that took too long is not queried again for so long
_CHECK_EVERY = 10_000  # instructions of SQLite between two checks of the time
_YEAR_10000 = 253_402_300_800  # seconds since 1970; browsers cannot write later dates
_MAX_MARKER = 1_000_000  # bytes of run.json


@dataclass
class _CachedSeries:
    steps: Steps
    values: Values
    time: (
        float | None
    )  # when the last of them was written: another time at the same step means that it was written again


class MetricsReader:
    """The metrics of one run, open for reading. Unlike `load_run` it does not check the whole file when it opens it.

    `version` changes whenever something was written. A resumed run forgets what came after its checkpoint and writes it
    again: such series are read again from the start.

    Args:
        path: The run folder.
        below: A folder above it. With it, nothing that is reached from there through a symbolic link is opened.
        seconds: Time limit for the queries of one call. Afterwards every call fails at once for a minute.
        reader: A process that reads the database instead of this one, which a run of others could crash; see
            `excite.runs.reader.processes`. After a crash every call fails at once for a minute.

    Raises:
        RunError: By every method: the database is damaged, holds something else than numbers, or took too long.
    """

    def __init__(
        self, path: Path, below: Path | None = None, seconds: float = _QUERY_SECONDS, reader: Reader | None = None
    ) -> None:
        self.path, self.below, self.seconds = path, below, seconds
        self._reader = reader if AVAILABLE else None
        self._deadline = math.inf
        self._retry, self._refusal = -math.inf, ""
        self._lock = threading.RLock()
        self._cache: dict[str, _CachedSeries] = {}
        self._names: list[str] = []
        self._last: tuple[int, float] | None = None
        self._connection: sqlite3.Connection | ReadElsewhere | None = None
        self._data_version: int | None = None
        self._file: tuple[int, int] | None = None
        self.version = 0
        with self._guard():
            self._open()

    @property
    def points(self) -> int:
        """How many numbers are kept in memory."""
        return sum(len(cached.steps) for cached in self._cache.values())

    def refresh(self) -> int:
        """Checks whether something was written since the last call; returns the version."""
        with self._guard():
            if self._file != _identity(self.path / "metrics.db", self.below):  # the folder was made again
                self._close()
                self._cache.clear()
                self._open()
            version = self._fetch_row("PRAGMA data_version")[0]
            if version != self._data_version:
                self._data_version = version
                self._names = [_text(row[0]) for row in self._execute(_NAMES)]
                if len(self._names) > MAX_NAMES:
                    raise RunError(f"{self.path / 'metrics.db'} has more than {MAX_NAMES:,} names")
                self._last = None
                self.version += 1
            return self.version

    def names(self) -> list[str]:
        """Returns the names of all metrics."""
        with self._lock:
            return list(self._names)

    def series(self, name: str) -> tuple[Steps, Values]:
        """Steps and values of one metric, as of now; empty if there is none. Not to be changed."""
        with self._guard():
            cached = self._cache.get(name)
            written, rows, last_time = self._read_after(name, cached)
            if cached is not None and written != cached.time:
                cached = None
                _, rows, last_time = self._read_after(name, cached)
            steps, values = rows["step"].copy(), np.where(rows["missing"], np.nan, rows["value"])
            if cached is not None:
                if not len(rows):
                    return cached.steps, cached.values
                steps, values = np.concatenate([cached.steps, steps]), np.concatenate([cached.values, values])
            if len(steps):
                self._cache[name] = _CachedSeries(steps, values, last_time)
            else:
                self._cache.pop(name, None)
            return steps, values

    def _read_after(
        self, name: str, cached: _CachedSeries | None
    ) -> tuple[float | None, npt.NDArray[Any], float | None]:
        """When the last cached step was written, what follows it, and when the last of that was written."""
        last = -1 if cached is None else int(cached.steps[-1])
        queries = ((_TIME, (name, last)), (_AFTER, (name, last)), (_LAST_TIME, (name,)))
        connection = self._opened()
        if isinstance(connection, ReadElsewhere):
            written, rows, last_time = connection.execute_together(*queries, array=1)
        else:
            with self._snapshot():
                written, last_time = (self._execute(*queries[at]).fetchall() for at in (0, 2))
                rows = np.fromiter(self._execute(*queries[1]), ROW)
        return written[0][0] if written else None, rows, last_time[0][0] if last_time else None

    def subsample(self, name: str, max_points: int = 1000) -> tuple[Steps, Values]:
        """About `max_points` points of a long series that was not read yet, at even distances: fast, but peaks are missed."""
        with self._guard(), self._snapshot():
            ends = self._ends(name, 5 * max_points)
            if ends is not None:
                sampled = self._execute(_SUBSAMPLE, (name, *ends, max_points)).fetchall()
                rows = np.unique(np.array(sampled, np.float64).reshape(-1, 3), axis=0)
                return rows[:, 0].astype(np.int64), np.where(rows[:, 2] > 0, np.nan, rows[:, 1])
        return self.series(name)

    def binned(
        self, name: str, max_points: int, low: float | None = None, high: float | None = None
    ) -> tuple[Steps, Steps, Values, Values, Values] | None:
        """Reduces a long series to about `max_points` bins of equal length in the database, from step `low` to `high`.

        Returns (first step, last step, smallest, mean, largest) per bin for a series of more than 50,000 points that was not read yet;
        values that are not finite are left out. None for other series, which are cheap to read.
        """
        with self._guard(), self._snapshot():
            ends = self._ends(name, _LONG)
            if ends is None:
                return None
            first = ends[0] if low is None else min(max(ends[0], int(low) - 1), ends[1])
            last = ends[1] if high is None else max(min(ends[1], int(high) + 1), ends[0])
            query = """SELECT min(step), max(step), min(value), avg(value), max(value) FROM metrics WHERE name = ? AND step BETWEEN ? AND ?
                       AND value BETWEEN -1.7e308 AND 1.7e308 GROUP BY (step - ?) / ?"""
            bins = self._execute(
                query, (name, first, last, first, max(1, -(-(last - first + 1) // max_points)))
            ).fetchall()
            rows = np.array(bins, np.float64).reshape(-1, 5)
            return rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64), rows[:, 2], rows[:, 3], rows[:, 4]

    def _ends(self, name: str, min_points: int) -> tuple[int, int] | None:
        """First and last step of a series that was not read yet and has at least so many points."""
        few = "SELECT count(*) FROM (SELECT 1 FROM metrics WHERE name = ? LIMIT ?)"
        if name in self._cache or self._execute(few, (name, min_points)).fetchone()[0] < min_points:
            return None
        # Two queries: one for both ends would walk over all rows.
        queries = (f"SELECT {end}(step) FROM metrics WHERE name = ?" for end in ("min", "max"))
        first, last = (_step(self._execute(query, (name,)).fetchone()[0]) for query in queries)
        return first, last

    def last(self) -> tuple[int, float] | None:
        """The last step at which anything was measured and when that was written (seconds since 1970)."""
        with self._guard():
            if self._last is None:
                self._last = checked_last(self._fetch_row(LAST))
            return self._last

    def latest(self, name: str) -> float | None:
        """The last value of one metric, read alone."""
        with self._guard():
            row = self._execute(_LATEST, (name,)).fetchone()
            return None if row is None or row[0] is None else float(row[0])

    def read_together(self, query: Callable[[Execute], Result]) -> Result:
        """Returns the result of `query`, which gets a function that runs SQL on one snapshot of the database."""
        with self._guard(), self._snapshot():
            return query(self._execute)

    def close(self) -> None:
        """Closes the database."""
        with self._lock:
            self._close()

    def _open(self) -> None:
        path = self.path / "metrics.db"
        self._file = _regular(path, self.below)
        self._connection = _read_only(path, _BUSY_SECONDS, None if self._reader is None else self._connect)
        if isinstance(self._connection, sqlite3.Connection):
            self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_TEXT)
            self._connection.set_progress_handler(lambda: time.monotonic() > self._deadline, _CHECK_EVERY)
        try:
            _check(self._connection, path)
        except BaseException:
            self._close()
            raise
        self._data_version = None

    def _connect(self, address: str) -> ReadElsewhere:
        assert self._reader is not None
        return ReadElsewhere(self._reader, address, _BUSY_SECONDS, self._deadline - time.monotonic())

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def _opened(self) -> sqlite3.Connection | ReadElsewhere:
        if self._connection is None:
            self._open()
        assert self._connection is not None
        if isinstance(self._connection, ReadElsewhere):
            self._connection.seconds = self._deadline - time.monotonic()
        return self._connection

    def _execute(self, query: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor | Rows:
        return self._opened().execute(query, values)

    def _fetch_row(self, query: str) -> Any:
        return self._execute(query).fetchone()

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """All queries inside see the database of one moment."""
        self._execute("BEGIN")
        try:
            yield
        except BaseException:
            self._close()
            raise
        self._execute("COMMIT")

    @contextmanager
    def _guard(self) -> Iterator[None]:
        path = self.path / "metrics.db"
        try:
            with self._lock, nullcontext() if self._reader is None else self._reader.lock:
                now = time.monotonic()
                if now < self._retry:
                    raise RunError(self._refusal)
                self._deadline = now + self.seconds
                if isinstance(self._connection, ReadElsewhere) and self._connection.ended:  # by another run
                    self._connection = None
                yield
        except Crashed as error:
            self._close()
            raise self._refuse(f"cannot read {path}: {error}") from error
        except (sqlite3.Error, OSError) as error:
            self._close()
            if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_INTERRUPT:
                raise RunError(f"cannot read {path}: {error}") from error
            raise self._refuse(f"{path} took longer than {self.seconds:g} s to read") from error
        except (TypeError, ValueError, OverflowError) as error:
            self._close()
            raise RunError(f"{path} is damaged: it holds something else than numbers ({error})") from error

    def _refuse(self, why: str) -> RunError:
        """The error of this call and of every call for a minute."""
        self._retry, self._refusal = time.monotonic() + _RETRY_SECONDS, why
        return RunError(why)


def read_status(path: Path, below: Path | None = None) -> tuple[str, str | None]:
    """Status of a run and its reason, from run.json: "running", "done", "failed", "stopped" or "stale".

    "stale" is a run that says it is running while no process holds its lock: it was killed. With `below`, links are not followed from
    there.
    """
    marker = read_json(path / "run.json", below, _MAX_MARKER)
    if not isinstance(marker, dict) or marker.get("format") != FORMAT:
        raise RunError(f"{path} is not a run folder of Excite: its run.json belongs to something else")
    check_version(path, marker.get("version"), VERSION)
    status, reason = marker.get("status"), marker.get("reason")
    if status not in STATUSES:
        raise RunError(f"{path / 'run.json'} is damaged: its status is {status!r:.40}")
    lock = path / "lock"  # a copy from a store has none
    if status == "running" and lock.exists() and not is_held(lock):
        return "stale", "its process ended without saying so"
    return str(status), None if reason is None else str(reason)[:1000]


def read_immutable(
    path: Path, query: Callable[[Execute], Result], below: Path | None, deadline: float
) -> Result | None:
    """Returns the result of `query`, which gets a function that runs SQL, if no process writes the database; None if one does.

    Args:
        path: The run folder.
        query: Called with a function of an SQL query and its values.
        below: See `MetricsReader`.
        deadline: When to give up, of `time.monotonic`.

    Raises:
        RunError: If the database is damaged or took too long.
    """
    database = path / "metrics.db"
    if any(_size(path / f"metrics.db{suffix}") for suffix in ("-wal", "-journal")):
        return None
    seconds = deadline - time.monotonic()
    try:
        _regular(database, below)
        address = f"{database.absolute().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as connection:
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_TEXT)
            connection.set_progress_handler(lambda: time.monotonic() > deadline, _CHECK_EVERY)
            _check(connection, database)
            return query(connection.execute)
    except (sqlite3.Error, OSError) as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            raise RunError(f"{database} took longer than {seconds:g} s to read") from error
        raise RunError(f"cannot read {database}: {error}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise RunError(f"{database} is damaged: it holds something else than numbers ({error})") from error


def _regular(path: Path, below: Path | None) -> tuple[int, int]:
    """Which file this is. It and what SQLite keeps beside it must be regular files: SQLite would wait for a FIFO for ever."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        try:
            descriptor = open_regular(path.with_name(path.name + suffix), below)
        except FileNotFoundError as error:
            if not suffix:
                raise RunError(f"{path} is missing: this run folder is not complete") from error
            continue
        if not suffix:
            identity = os.fstat(descriptor)
        os.close(descriptor)
    return identity.st_dev, identity.st_ino


def _check(connection: sqlite3.Connection | ReadElsewhere, path: Path) -> None:
    """Whether this is a database of Excite whose metrics are a plain table: a view can compute for ever."""
    connection.execute("PRAGMA trusted_schema = OFF")
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
        raise RunError(f"{path} is not a metrics database of Excite")
    query = "SELECT type, rootpage > 0 FROM sqlite_master WHERE lower(name) = 'metrics' LIMIT 2"
    columns = connection.execute("PRAGMA table_xinfo(metrics)").fetchall()
    if connection.execute(query).fetchall() != [("table", 1)] or [(c[1], c[5], c[6]) for c in columns] != _COLUMNS:
        raise RunError(f"{path} is damaged: its metrics are not the table that Excite writes")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name of type {type(value).__name__}")
    return value


def _step(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise TypeError(f"step {value!r:.40}")
    return value


def checked_last(row: tuple[Any, Any]) -> tuple[int, float] | None:
    """The last step and its time, of a row of the query `LAST`; None if nothing was measured."""
    if row == (None, None):
        return None
    step, when = _step(row[0]), row[1]
    if not isinstance(when, int | float) or not 0 <= when < _YEAR_10000:
        raise TypeError(f"time {when!r:.40}")
    return step, float(when)


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _identity(path: Path, below: Path | None) -> tuple[int, int] | None:
    try:
        status = os.stat(path, follow_symlinks=below is None)
    except OSError:
        return None
    return status.st_dev, status.st_ino
