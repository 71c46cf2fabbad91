"""The runs below one folder, and nothing outside it."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from excite.errors import ExciteError, InputError, RunError
from excite.report.view import Shown
from excite.runs.files import read_json
from excite.runs.following import Follower, standing

MOST_RUNS, _DEPTH, _LONGEST = 2000, 6, 1000
_MOST_POINTS = 16_000_000  # numbers kept in memory for all runs together: 256 MB
_MOST_OPEN = 256
_FILES = ("run.json", "config.json", "environment.json", "metrics.db", "artifacts")


class NotFound(InputError):
    """There is no such run below the folder."""


@dataclass(frozen=True)
class Row:
    """One line of the list of runs."""

    id: str
    status: str
    reason: str | None
    step: int | None = None
    loss: float | None = None
    updated: float | None = None


class Runs:
    """Runs by their path below `root`. Open ones are kept, the least recently used are closed."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        if not self.root.is_dir():
            raise RunError(f"there is no folder {self.root}: name a folder of runs, or a run")
        self._real = self.root.resolve()
        self._open: OrderedDict[str, Follower] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self._real.name or str(self._real)

    @property
    def real(self) -> Path:
        return self._real

    def rows(self) -> list[Row]:
        """All runs, those that were written last first."""
        found = [self._row(name) for name in self.ids()]
        return sorted(found, key=lambda row: (row.updated is None, -(row.updated or 0.0), row.id))

    def ids(self) -> list[str]:
        found = []
        for name in self._walk(self._real, 0):
            found.append(name)
            if len(found) == MOST_RUNS:
                break
        return found

    def _walk(self, folder: Path, depth: int) -> Iterator[str]:
        if (folder / "run.json").is_file():
            yield folder.relative_to(self._real).as_posix()
            return
        if depth == _DEPTH:
            return
        try:
            with os.scandir(folder) as entries:
                inside = sorted(
                    e.name for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)
                )
        except OSError:
            return
        for name in inside:
            yield from self._walk(folder / name, depth + 1)

    def _row(self, name: str) -> Row:
        try:
            status, reason = standing(self.path(name))
            follower = self.follower(name)
            last = follower.last()
            step, updated = last if last is not None else (None, None)
            return Row(name, status, reason, step, follower.latest("loss/step"), updated)
        except ExciteError as error:
            return Row(name, "unreadable", self.within(error))

    def within(self, error: ExciteError) -> str:
        """An error as one line, with paths as seen from the folder."""
        return " ".join(str(error).split()).replace(str(self._real), self.name)

    def path(self, name: str) -> Path:
        """The folder of the run called `name`; anything that is not a run below the root is refused."""
        parts = PurePosixPath(name).parts
        plain = 0 < len(name) <= _LONGEST and name.isprintable() and "\\" not in name
        if not plain or name.startswith("/") or ".." in parts or any(part.startswith(".") for part in parts):
            raise NotFound("there is no such run")
        path = self._real.joinpath(*parts)
        try:
            # Links may lead anywhere: neither the run nor what is read of it may be one.
            linked = path.resolve() != path or any((path / file).is_symlink() for file in _FILES)
            there = (path / "run.json").is_file()
        except (OSError, ValueError, RuntimeError):
            linked = there = False
        if linked or not there:
            raise NotFound("there is no such run")
        return path

    def follower(self, name: str) -> Follower:
        """The run's metrics as of now."""
        path = self.path(name)
        with self._lock:
            found = self._open.pop(name, None) or Follower(path)
            self._open[name] = found
            points = sum(one.points for one in self._open.values())
            while len(self._open) > 1 and (points > _MOST_POINTS or len(self._open) > _MOST_OPEN):
                _, old = self._open.popitem(last=False)
                points -= old.points
                old.close()
        found.refresh()
        return found

    def shown(self, names: list[str]) -> list[Shown]:
        """Runs as a page shows them, each with its own colour."""
        return [Shown(self.follower(n), self.label(n), i, order=layers(self.path(n))) for i, n in enumerate(names)]

    def label(self, name: str) -> str:
        return self.name if name in (".", "") else name

    def close(self) -> None:
        with self._lock:
            for one in self._open.values():
                one.close()
            self._open.clear()


def layers(path: Path) -> tuple[str, ...]:
    """Layers in the order of execution, if the run knows its wiring."""
    try:
        found: Any = read_json(path / "artifacts" / "wiring.json")
        return tuple(str(row["name"]) for row in found["layers"])
    except (ExciteError, KeyError, TypeError):
        return ()
