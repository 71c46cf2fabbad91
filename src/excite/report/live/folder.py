"""The runs below one folder; nothing outside it is read."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from excite._core.files import read_json
from excite.errors import ExciteError, InputError, RunError
from excite.report.alerts import group_keys
from excite.report.collect import stored_accuracy, stored_margins, stored_unit, wiring_roles
from excite.report.verdict.outcome import RunOutcome, displayed_status, from_latest, from_margins
from excite.report.verdict.runs import NAMES, SPARKS
from excite.report.view import RunView
from excite.runs.reader import MetricsReader, Overview, overview, read_overview, read_status
from excite.runs.reader.processes import Readers

MAX_RUNS, _DEPTH, _MAX_NAME = 2000, 6, 1000
_MAX_FOLDERS = 20_000  # searched for runs
_MAX_POINTS = 16_000_000  # numbers kept in memory for all runs together: 256 MB
_MAX_OPEN = 64  # three files each
_FILES = ("run.json", "config.json", "environment.json", "metrics.db", "artifacts")
_STAMPED = ("run.json", "config.json", "environment.json", "artifacts", "lock", "metrics.db", "metrics.db-wal")
LIST_SECONDS = 0.5  # for reading rows of one list
ROW_SECONDS, QUERY_SECONDS = 1.0, 5.0  # for the queries of one row, and of one call for a page
_SETTLED = 2_000_000_000  # nanoseconds: a file written later than this ago may change without another time
_MAX_WIRING = 64_000_000  # bytes
_MAX_STORED = 2_000_000  # bytes of stored margins that the list reads
_MAX_REASON, _MAX_LOGGED = 500, 1000
_READERS = Readers()  # for runs that others can write
_log = logging.getLogger("excite.serve")
Stamp = tuple[tuple[int, int, int, int, int] | None, ...]


class NotFound(InputError):
    """Raised if a run does not exist below the folder."""


@dataclass(frozen=True)
class RunRow:
    """One line of the list of runs."""

    id: str
    status: str
    reason: str | None
    step: int | None = None
    loss: float | None = None
    updated: float | None = None
    outcome: RunOutcome = field(default_factory=RunOutcome)
    alerts: int = 0  # rules and quantities
    spark: tuple[str, tuple[float, ...]] | None = None


def start_reader() -> None:
    """Starts the first process that reads databases, so that the first page does not wait for it."""
    _READERS.start()


class Runs:
    """Runs by their path below `root`. Open ones are kept, the least recently used are closed."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise RunError(f"there is no folder {self.root}: name a folder of runs, or a run")
        self._real = self.root.resolve()
        self._open: OrderedDict[str, MetricsReader] = OrderedDict()
        self._rows: dict[str, tuple[Stamp | None, RunRow]] = {}
        self._next: str | None = None  # the first run that the last list did not reach
        self._logged: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """Name of the folder, for titles."""
        return (self._real.name or str(self._real)).encode("utf-8", "replace").decode()

    @property
    def real(self) -> Path:
        """The folder with symbolic links resolved."""
        return self._real

    def rows(self) -> list[RunRow]:
        """All runs, most recently written first. Runs whose files did not change are not read again.

        Reading stops after half a second. Remaining rows keep their previous values or the status "reading"; the next call
        starts with them.
        """
        names = self.ids()
        start = next((i for i, name in enumerate(names) if name == self._next), 0)
        deadline = time.monotonic() + LIST_SECONDS
        rows, next_name, has_read = [], None, False
        for name in names[start:] + names[:start]:
            stamp = self._stamp(name)
            row = self._unchanged(name, stamp)
            if row is None and has_read and time.monotonic() > deadline:
                next_name = next_name or name
                row = self._rows[name][1] if name in self._rows else RunRow(name, "reading", None)
            elif row is None:
                row, has_read = self._row(name, stamp), True
            rows.append(row)
        with self._lock:
            self._next = next_name
            for gone in self._rows.keys() - set(names):
                del self._rows[gone]
        return sorted(rows, key=lambda row: (row.updated is None, -(row.updated or 0.0), row.id))

    def ids(self) -> list[str]:
        """Paths of the runs below the folder, at most `MAX_RUNS`."""
        names: list[str] = []
        folders = [(self._real, 0)]  # still to be searched, the last one first
        for _ in range(_MAX_FOLDERS):
            if not folders or len(names) == MAX_RUNS:
                break
            folder, depth = folders.pop()
            if os.path.lexists(folder / "run.json"):
                names.append(folder.relative_to(self._real).as_posix())
            elif depth < _DEPTH:
                folders += [(folder / name, depth + 1) for name in reversed(folders_in(folder))]
        return names

    def _unchanged(self, name: str, stamp: Stamp) -> RunRow | None:
        """From memory, if the run's files are as they were; whether its process is alive is checked every time."""
        known = self._rows.get(name)
        if known is None or known[0] != stamp:
            return None
        row = known[1]
        if row.status in ("running", "stale"):
            try:
                status, reason = read_status(self.path(name), self._real)
            except ExciteError:
                return None
            return row if status == row.status else replace(row, status=status, reason=reason)
        return row

    def _row(self, name: str, before: Stamp) -> RunRow:
        """Nothing that is wrong with one run gets further than its row."""
        try:
            with self.reading(name):
                path = self.path(name)
                status, reason = read_status(path, self._real)
                metrics = read_overview(path, NAMES, SPARKS, self._real, ROW_SECONDS, _READERS.assign())
                if self._stamp(name)[-2:] != before[-2:]:  # somebody writes: again, with all of SQLite's locks
                    metrics = overview(self.metrics_reader(name), NAMES, SPARKS)
                row = self._shown(name, status, reason, metrics)
        except ExciteError as error:
            row = RunRow(name, "unreadable", self.within(error))
            self._log(name, str(row.reason))
        newest = max((file[0] for file in before if file is not None), default=0)
        settled = newest < time.time_ns() - _SETTLED and self._stamp(name) == before
        with self._lock:
            self._rows[name] = before if settled else None, row
        return row

    def _shown(self, name: str, status: str, reason: str | None, metrics: Overview) -> RunRow:
        """The row of a run with these last values; margins that were stored at the end are read from its folder."""
        status, reason = displayed_status(status, reason, metrics)
        outcome = stored_outcome(self.path(name), self._real)
        if not outcome.medians:
            latest = from_latest(metrics.latest)
            outcome = replace(latest, accuracy={**latest.accuracy, **outcome.accuracy})
            if latest.margin is not None:
                with suppress(ExciteError):  # the page of the run says what is wrong
                    outcome = replace(outcome, unit=stored_unit(self.path(name), self._real))
        if status == "diverged":  # what was measured before says nothing
            outcome = RunOutcome()
        groups = len(group_keys(metrics.alerts))
        loss = metrics.latest.get("loss/step")
        return RunRow(name, status, reason, metrics.step, loss, metrics.updated, outcome, groups, metrics.spark)

    def overviews(self, names: list[str]) -> dict[Path, Overview]:
        """The last values of runs, by their folder."""
        return {self.path(name): overview(self.metrics_reader(name), NAMES, SPARKS) for name in names}

    def _stamp(self, name: str) -> Stamp:
        """Times, sizes and identities of a run's files: what has to change if the run changes."""
        stamps: list[tuple[int, int, int, int, int] | None] = []
        for file in _STAMPED:
            try:
                info = os.lstat(f"{self._real}/{name}/{file}")
            except (OSError, ValueError):
                stamps.append(None)
            else:
                stamps.append((info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino, info.st_mode))
        return tuple(stamps)

    @contextmanager
    def reading(self, *names: str) -> Iterator[None]:
        """Converts any exception inside to an error in one line about these runs."""
        try:
            yield
        except ExciteError:
            raise
        except Exception as error:
            labels = ", ".join(map(self.label, names))
            raise RunError(f"{labels} cannot be read: {type(error).__name__}: {error}") from error

    def _log(self, name: str, reason: str) -> None:
        """Once per run and reason."""
        with self._lock:
            if (name, reason) in self._logged or len(self._logged) == _MAX_LOGGED:
                return
            self._logged.add((name, reason))
        _log.warning("run %s is unreadable: %s", "".join(c if c.isprintable() else "?" for c in name), reason)

    def within(self, error: ExciteError) -> str:
        """An error as one line, with paths as seen from the folder."""
        text = " ".join(str(error).split()).replace(str(self._real), self.name)
        return "".join(c if c.isprintable() else "?" for c in text[:_MAX_REASON])

    def path(self, name: str) -> Path:
        """The folder of the run called `name`; anything that is not a run below the root is refused."""
        names = PurePosixPath(name).parts
        plain = 0 < len(name) <= _MAX_NAME and name.isprintable() and "\\" not in name
        if not plain or name.startswith("/") or ".." in names or any(name.startswith(".") for name in names):
            raise NotFound("there is no such run")
        path = self._real.joinpath(*names)
        try:
            # Links may lead anywhere: neither the run nor what is read of it may be one.
            linked = path.resolve() != path or any((path / file).is_symlink() for file in _FILES)
            mode = os.lstat(path / "run.json").st_mode
        except (OSError, ValueError, RuntimeError) as error:
            raise NotFound("there is no such run") from error
        if linked:
            raise NotFound("there is no such run: symbolic links are not followed")
        if not stat.S_ISREG(mode):
            raise NotFound("there is no such run: its run.json is not a regular file")
        return path

    def metrics_reader(self, name: str) -> MetricsReader:
        """The run's metrics as of now."""
        path = self.path(name)
        # Opening may take long: not while others wait for the lock.
        result = self._open.get(name) or MetricsReader(path, self._real, QUERY_SECONDS, _READERS.assign())
        with self._lock:
            other = self._open.pop(name, None)  # opened by somebody else meanwhile
            if other is not None and other is not result:
                result.close()
                result = other
            self._open[name] = result
            points = sum(reader.points for reader in self._open.values())
            while len(self._open) > 1 and (points > _MAX_POINTS or len(self._open) > _MAX_OPEN):
                _, old = self._open.popitem(last=False)
                points -= old.points
                old.close()
        result.refresh()
        return result

    def shown(self, names: list[str]) -> list[RunView]:
        """Runs as a page shows them, each with its own colour."""
        shown = []
        for i, name in enumerate(names):
            order, roles = layers_and_roles(self.path(name), self._real)
            shown.append(RunView(self.metrics_reader(name), self.label(name), i, order=order, roles=roles))
        return shown

    def label(self, name: str) -> str:
        """The run's name on the page."""
        return self.name if name in (".", "") else name

    def close(self) -> None:
        """Closes all open runs."""
        with self._lock:
            for reader in self._open.values():
                reader.close()
            self._open.clear()


def layers_and_roles(path: Path, below: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """Layers in the order of execution, and what layers, heads and laws do, if the run knows its wiring."""
    try:
        wiring: Any = read_json(path / "artifacts" / "wiring.json", below, _MAX_WIRING)
        return tuple(str(row["name"]) for row in wiring["layers"]), wiring_roles(wiring)
    except (ExciteError, KeyError, TypeError):
        return (), {}


def stored_outcome(path: Path, below: Path) -> RunOutcome:
    """Margins and accuracy that were stored at the end of a run; empty if there are none, or they are damaged or large."""
    try:
        return from_margins(stored_margins(path, below, _MAX_STORED), stored_accuracy(path, below))
    except (ExciteError, KeyError, TypeError, ValueError, OverflowError):
        return RunOutcome()  # the page of the run says what is wrong


def folders_in(folder: Path) -> list[str]:
    """Names of the folders in a folder, sorted; hidden ones and links are left out."""
    try:
        with os.scandir(folder) as entries:
            return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False))
    except OSError:
        return []
