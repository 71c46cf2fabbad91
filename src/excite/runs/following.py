"""Follow a run while another process writes it: what is new is read, what was read is kept."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from excite.errors import RunError
from excite.runs.files import read_json
from excite.runs.folder import FORMAT, VERSION
from excite.runs.lock import held
from excite.runs.metrics import APPLICATION, _read_only
from excite.runs.versions import check_version

Steps = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]

# All names by one search each in the primary key (name, step), instead of a walk over every row.
_NAMES = """
WITH RECURSIVE found(name) AS (
    SELECT (SELECT min(name) FROM metrics)
    UNION ALL SELECT (SELECT min(name) FROM metrics WHERE name > found.name) FROM found WHERE found.name IS NOT NULL
) SELECT name FROM found WHERE name IS NOT NULL
"""
_ROW = np.dtype([("step", np.int64), ("value", np.float64), ("missing", np.bool_)])
_LONG = 50_000  # points
_TIMEOUT = 2000  # milliseconds: a page would rather say that the database is busy than wait


@dataclass
class _Kept:
    steps: Steps
    values: Values
    time: (
        float | None
    )  # when the last of them was written: another time at the same step means that it was written again


class Follower:
    """The metrics of one run, open for reading. Unlike `load_run` it does not check the whole file when it opens it.

    `version` changes whenever something was written. A resumed run forgets what came after its checkpoint and writes it
    anew: such series are read again from the start.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._kept: dict[str, _Kept] = {}
        self._names: list[str] = []
        self._last: tuple[int, float] | None = None
        self._connection: sqlite3.Connection | None = None
        self._data_version: int | None = None
        self._file: tuple[int, int] | None = None
        self.version = 0
        with self._guard():
            self._open()

    @property
    def points(self) -> int:
        """How many numbers are kept in memory."""
        return sum(len(one.steps) for one in self._kept.values())

    def refresh(self) -> int:
        """Look whether something was written since the last look; returns the version."""
        with self._guard():
            if self._file != _identity(self.path / "metrics.db"):  # the folder was made anew
                self._close()
                self._kept.clear()
                self._open()
            seen = self._one("PRAGMA data_version")[0]
            if seen != self._data_version:
                self._data_version = seen
                self._names = [row[0] for row in self._ask(_NAMES)]
                self._last = None
                self.version += 1
            return self.version

    def names(self) -> list[str]:
        with self._lock:
            return list(self._names)

    def series(self, name: str) -> tuple[Steps, Values]:
        """Steps and values of one metric, as of now; empty if there is none. Not to be changed."""
        with self._guard(), self._snapshot():
            kept = self._kept.get(name)
            if kept is not None and self._time(name, kept.steps[-1]) != kept.time:
                kept = None
            query = (
                "SELECT step, ifnull(value, 0.0), value IS NULL FROM metrics WHERE name = ? AND step > ? ORDER BY step"
            )
            rows = np.fromiter(self._ask(query, (name, -1 if kept is None else int(kept.steps[-1]))), _ROW)
            steps, values = rows["step"].copy(), np.where(rows["missing"], np.nan, rows["value"])
            if kept is not None:
                if not len(rows):
                    return kept.steps, kept.values
                steps, values = np.concatenate([kept.steps, steps]), np.concatenate([kept.values, values])
            if len(steps):
                self._kept[name] = _Kept(steps, values, self._time(name, steps[-1]))
            else:
                self._kept.pop(name, None)
            return steps, values

    def sketch(self, name: str, most: int = 1000) -> tuple[Steps, Values]:
        """About `most` points of a long series that was not read yet, at even distances: fast, but peaks are missed."""
        with self._guard(), self._snapshot():
            ends = self._ends(name, 5 * most)
            if ends is not None:
                one = "SELECT step, ifnull(value, 0.0), value IS NULL FROM metrics WHERE name = ? AND step >= ? ORDER BY step LIMIT 1"
                wanted = np.linspace(ends[0], ends[1], most).astype(np.int64).tolist()
                rows = np.unique(
                    np.array([self._ask(one, (name, step)).fetchone() for step in wanted], np.float64), axis=0
                )
                return rows[:, 0].astype(np.int64), np.where(rows[:, 2] > 0, np.nan, rows[:, 1])
        return self.series(name)

    def stretches(
        self, name: str, most: int, low: float | None = None, high: float | None = None
    ) -> tuple[Steps, Steps, Values, Values, Values] | None:
        """(first step, last step, smallest, mean, largest) of about `most` stretches of equal length of a series of more than
        50,000 points that was not read yet, from step `low` to `high`: the database reads every value, but none of them
        comes here. What is not finite is left out. None for other series: reading those is no trouble."""
        with self._guard(), self._snapshot():
            ends = self._ends(name, _LONG)
            if ends is None:
                return None
            first = ends[0] if low is None else max(ends[0], int(low) - 1)
            last = ends[1] if high is None else min(ends[1], int(high) + 1)
            query = """SELECT min(step), max(step), min(value), avg(value), max(value) FROM metrics WHERE name = ? AND step BETWEEN ? AND ?
                       AND value BETWEEN -1.7e308 AND 1.7e308 GROUP BY (step - ?) / ?"""
            found = self._ask(query, (name, first, last, first, max(1, -(-(last - first + 1) // most)))).fetchall()
            rows = np.array(found, np.float64).reshape(-1, 5)
            return rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64), rows[:, 2], rows[:, 3], rows[:, 4]

    def _ends(self, name: str, many: int) -> tuple[int, int] | None:
        """First and last step of a series that was not read yet and has at least so many points."""
        few = "SELECT count(*) FROM (SELECT 1 FROM metrics WHERE name = ? LIMIT ?)"
        if name in self._kept or self._ask(few, (name, many)).fetchone()[0] < many:
            return None
        # Two queries: one for both ends would walk over all rows.
        queries = (f"SELECT {end}(step) FROM metrics WHERE name = ?" for end in ("min", "max"))
        first, last = (int(self._ask(query, (name,)).fetchone()[0]) for query in queries)
        return first, last

    def last(self) -> tuple[int, float] | None:
        """The last step at which anything was measured and when that was written (seconds since 1970)."""
        with self._guard():
            if self._last is None:
                query = "SELECT step, time FROM metrics WHERE name = ? ORDER BY step DESC LIMIT 1"
                found = [row for name in self._names if (row := self._ask(query, (name,)).fetchone())]
                self._last = (max(row[0] for row in found), max(row[1] for row in found)) if found else None
            return self._last

    def latest(self, name: str) -> float | None:
        """The last value of one metric, read alone."""
        with self._guard():
            row = self._ask("SELECT value FROM metrics WHERE name = ? ORDER BY step DESC LIMIT 1", (name,)).fetchone()
            return None if row is None else row[0]

    def close(self) -> None:
        with self._lock:
            self._close()

    def _open(self) -> None:
        path = self.path / "metrics.db"
        self._file = _identity(path)
        if self._file is None:
            raise RunError(f"{path} is missing: this run folder is not complete")
        self._connection = _read_only(path)
        self._connection.execute(f"PRAGMA busy_timeout = {_TIMEOUT}")
        if self._one("PRAGMA application_id")[0] != APPLICATION:
            self._close()
            raise RunError(f"{path} is not a metrics database of Excite")
        self._data_version = None

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def _ask(self, query: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        if self._connection is None:
            self._open()
        assert self._connection is not None
        return self._connection.execute(query, values)

    def _one(self, query: str) -> Any:
        return self._ask(query).fetchone()

    def _time(self, name: str, step: Any) -> float | None:
        row = self._ask("SELECT time FROM metrics WHERE name = ? AND step = ?", (name, int(step))).fetchone()
        return None if row is None else row[0]

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        """All queries inside see the database of one moment."""
        self._ask("BEGIN")
        try:
            yield
        finally:
            if self._connection is not None:
                self._connection.execute("COMMIT")

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except (sqlite3.Error, OSError) as error:
            self._close()
            raise RunError(f"cannot read {self.path / 'metrics.db'}: {error}") from error


def standing(path: Path) -> tuple[str, str | None]:
    """How a run stands and why, from its run.json: "running", "done", "failed", "stopped", or "stale" for one that says
    it is running while no process holds its lock, so it was killed."""
    marker = read_json(path / "run.json")
    if not isinstance(marker, dict) or marker.get("format") != FORMAT:
        raise RunError(f"{path} is not a run folder of Excite: its run.json belongs to something else")
    check_version(path, marker.get("version"), VERSION)
    status, reason = str(marker.get("status")), marker.get("reason")
    lock = path / "lock"  # a copy from a store has none
    if status == "running" and lock.exists() and not held(lock):
        return "stale", "its process ended without saying so"
    return status, None if reason is None else str(reason)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
