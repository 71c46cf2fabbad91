"""How far many pieces of work are: which wait, run, are done or failed, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from excite._core.files import write_json, writing
from excite.errors import ExciteError
from excite.jobs.job import Work
from excite.jobs.logs import log_of

FILE, FORMAT = "tasks.json", "excite-tasks"
STATES = ("waiting", "running", "done", "failed")
_PAUSE = 1.0  # seconds between two states of the file


@dataclass
class Entry:
    """One piece of work; `share` of it is done."""

    name: str
    arm: str
    seed: int
    log: str
    state: str = "waiting"
    phase: str = ""
    share: float = 0.0
    reason: str | None = None
    found: bool = False  # was finished before


class Tally:
    """Told what engines tell (see `excite.jobs.job.Tell`)."""

    def __init__(
        self, todo: Sequence[Work], left: Collection[Work], clock: Callable[[], float] = time.monotonic
    ) -> None:
        unfinished = {task.folder.name for task in left}
        self.entries = {task.folder.name: Entry(task.folder.name, task.arm, task.seed, log_of(task)) for task in todo}
        for name, entry in self.entries.items():
            if name not in unfinished:
                entry.state, entry.share, entry.found = "done", 1.0, True
        self._clock, self._begun = clock, clock()

    def tell(self, name: str, phase: str, share: float) -> None:
        entry = self.entries[name]
        if entry.state in ("done", "failed"):  # messages from other machines may come late
            return
        entry.phase, entry.share = phase, max(0.0, min(1.0, share))
        entry.state = phase if phase in ("waiting", "done") else "running"
        if phase.startswith("failed: "):
            entry.state, entry.phase, entry.share, entry.reason = "failed", "", 0.0, phase.removeprefix("failed: ")

    def count(self, state: str) -> int:
        return sum(entry.state == state for entry in self.entries.values())

    def of(self, state: str) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.state == state]

    @property
    def done(self) -> float:
        """Pieces of work done; one under way counts in part."""
        return sum(entry.share for entry in self.entries.values())

    def seconds_left(self) -> float | None:
        """At the pace so far; None before a twentieth of a piece is done."""
        gained = sum(entry.share for entry in self.entries.values() if not entry.found)
        remaining = sum(1 - entry.share for entry in self.entries.values() if entry.state in ("waiting", "running"))
        spent = self._clock() - self._begun
        return remaining * spent / gained if gained >= 0.05 else None

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {state}" for state in STATES[1:] if (n := self.count(state)))
        left = self.seconds_left()
        ending = "" if left is None or not (self.count("waiting") + self.count("running")) else f", {_long(left)} left"
        return f"{len(self.entries)} tasks: {counts or 'none has begun'}{ending}"

    def plain(self, ended: bool = False) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "updated": time.time(),
            "ended": ended,
            "seconds_left": self.seconds_left(),
            "tasks": [asdict(entry) for entry in self.entries.values()],
        }


class Noted:
    """Writes a tally to tasks.json beside the runs, for pages that show it: at most once a second, and at the end."""

    def __init__(self, tally: Tally, folder: Path, keep: Callable[[str], None] | None = None) -> None:
        self.tally, self.path, self.keep = tally, folder / FILE, keep
        self._next, self._next_kept = 0.0, 0.0

    def __call__(self, ended: bool = False) -> None:
        now = time.monotonic()
        if now < self._next and not ended:
            return
        self._next = now + _PAUSE
        with suppress(ExciteError):  # work goes on, seen or not
            with writing(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.tally.plain(ended))
            if self.keep is not None and (ended or now >= self._next_kept):
                self._next_kept = now + 10 * _PAUSE
                self.keep(FILE)


def _long(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
