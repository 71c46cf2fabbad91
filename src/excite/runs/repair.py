"""Checks a run folder and repairs what can be repaired; what is replaced is stored beside it.

A run that was killed needs no repair: it is continued. This is for files that were lost, cut short or changed afterwards.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from excite._core.files import read_json, write_json, writing
from excite.errors import RunError
from excite.runs import checkpoints
from excite.runs.checkpoints import Checkpoint
from excite.runs.checks import MAX_STEP, NewerVersion
from excite.runs.folder import check_folder_name, check_marker, new_marker, start_metrics
from excite.runs.lock import Lock, is_held
from excite.runs.metrics import MetricsTable, _read_only

BACKUP = ".before-repair"  # hidden: copies to a store leave it out
_DATABASE = ("metrics.db", "metrics.db-wal", "metrics.db-shm", "metrics.db-journal")


@dataclass(frozen=True)
class Problem:
    """A problem of a run folder.

    Attributes:
        what: Description.
        remedy: What repairs it; None if it cannot be repaired.

    Example:
        >>> Problem("metrics.db is missing", remedy="a new table is started").remedy
        'a new table is started'
    """

    what: str
    remedy: str | None = None

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy or 'cannot be repaired, restore it from a copy'}"


@dataclass(frozen=True)
class Repair:
    """Result of `repair`.

    Attributes:
        path: Run folder.
        problems: Problems found.
        step: Step of the checkpoint from which the run resumes.
        mended: Whether repairs were made; False if it was only checked.
        backup: Folder of the files that were replaced.

    Example:
        >>> with Run.create("runs/first", {}) as run:
        ...     run.log(1, {"loss/step": 0.7})
        >>> repair("runs/first").problems
        ()
    """

    path: Path
    problems: tuple[Problem, ...]
    step: int | None
    mended: bool
    backup: Path | None = None

    @property
    def whole(self) -> bool:
        """Whether no problem is left."""
        return not self.problems or (self.mended and all(problem.remedy for problem in self.problems))

    def __str__(self) -> str:
        lines = [f"{self.path}: {'nothing is wrong' if not self.problems else f'{len(self.problems)} found'}"]
        lines += [f"- {problem}" for problem in self.problems]
        if self.backup is not None:
            lines.append(f"what was replaced is in {self.backup}")
        after = "the beginning: there is no checkpoint" if self.step is None else f"step {self.step}"
        return "\n".join([*lines, f"continues from {after}"])


def repair(path: str | os.PathLike[str], *, dry_run: bool = False) -> Repair:
    """Checks a run folder and repairs it: JSON files, metrics, checksums of checkpoints, and that metrics reach the checkpoint.

    Files that are replaced or removed are moved to `.before-repair` in the run. The run then resumes from its last good
    checkpoint: the newest one that the metrics reach, or, if they reach none, the newest intact one, without the lost metrics.

    Args:
        path: Run folder.
        dry_run: Whether to check only.

    Returns:
        Problems and what was repaired.

    Raises:
        RunError: If this is no run folder, or another process is writing to it.

    Example:
        >>> with Run.create("runs/first", {}) as run:
        ...     run.log(1, {"loss/step": 0.7})
        >>> print(repair("runs/first", dry_run=True))
    """
    run = check_folder_name(path)
    if not run.is_dir() or not any((run / name).is_file() for name in ("run.json", "config.json")):
        raise RunError(f"{run} is not a run folder of Excite: it has no run.json")
    with _alone(run, dry_run):
        check = _Check(run)
        step = check.everything()
        if not dry_run:
            for action in check.actions:
                action()
        backup = check.backup if not dry_run and check.backup.exists() else None
        return Repair(run, tuple(check.problems), step, not dry_run, backup)


@contextmanager
def _alone(run: Path, dry_run: bool) -> Iterator[None]:
    if dry_run:
        if (run / "lock").exists() and is_held(run / "lock"):
            raise RunError(f"another process is writing to {run}: wait for it, or stop it")
        yield
        return
    lock = Lock(run / "lock", run)
    try:
        yield
    finally:
        lock.release()


@dataclass
class _Check:
    run: Path
    problems: list[Problem] = field(default_factory=list)
    actions: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        number = 1
        while (self.run / BACKUP / str(number)).exists():
            number += 1
        self.backup = self.run / BACKUP / str(number)

    def everything(self) -> int | None:
        """Collect problems and what mends them; returns the step from which the run continues."""
        status = self._json_files()
        for name in ("checkpoints", "artifacts"):
            if not (self.run / name).is_dir():
                self._add(f"{name} is missing", "an empty folder is made", (self.run / name).mkdir)
        good = self._checkpoints()
        for path in sorted((self.run / "artifacts").glob("*.json")):
            if (error := _unreadable(path)) is not None:
                self._add(error, "it is set aside: measure it again", partial(self._move_to_backup, path))
        return self._metrics(good, status == "done")

    def _add(self, description: object, remedy: str | None = None, action: Callable[[], Any] | None = None) -> None:
        self.problems.append(Problem(str(description), remedy))
        if action is not None:
            self.actions.append(action)

    def _json_files(self) -> str | None:
        status: str | None = None
        try:
            status = check_marker(self.run)
        except NewerVersion:
            raise
        except RunError as error:
            remedy = "it is written again, with status 'stopped'"
            self._add(error, remedy, partial(self._write, "run.json", new_marker("stopped", "repaired")))
        if (problem := _unreadable(self.run / "config.json")) is not None:
            self._add(problem)
        if (problem := _unreadable(self.run / "environment.json")) is not None:
            note = {"repaired": "environment.json was lost: it is not known what this run was made with"}
            self._add(problem, "it is written again, empty", partial(self._write, "environment.json", note))
        return status

    def _checkpoints(self) -> list[tuple[Checkpoint, int]]:
        """Those that are whole, oldest first, with the number of commits to the metrics that each needs."""
        good: list[tuple[Checkpoint, int]] = []
        known = checkpoints.find(self.run / "checkpoints")
        for path in sorted({*(self.run / "checkpoints").glob("*.safetensors")} - {c.path for c in known}):
            self._add(f"{path} is never read: its name is not that of a checkpoint", "it is set aside", partial(self._move_to_backup, path))  # fmt: skip
        for checkpoint in known:
            try:
                good.append((checkpoint, checkpoints.read_with_commits(checkpoint.path)[2]))
            except NewerVersion as error:
                self._add(error, None)
            except RunError as error:
                description = str(error).partition(": delete it")[0]
                self._add(description, "it is set aside", partial(self._move_to_backup, checkpoint.path))
        return good

    def _metrics(self, good: list[tuple[Checkpoint, int]], done: bool) -> int | None:
        path = self.run / "metrics.db"
        last = good[-1][0].step if good else None
        if not path.is_file():
            self._add(f"{path} is missing", "a new table is started, what was measured is lost", partial(start_metrics, self.run))  # fmt: skip
            return last
        try:
            metrics = MetricsTable(path, "r")
        except NewerVersion:
            raise
        except RunError as error:
            rows = list(_readable_rows(path))
            remedy = f"{len(rows)} values can be read and are kept"
            self._add(str(error).partition(": restore it")[0], remedy, partial(self._salvage, rows))
            return last
        with closing(metrics):
            commits, end = metrics.commits, metrics.last_step()
        if not good or good[-1][1] <= commits:
            return last
        description = (
            f"the metrics {'are empty' if end is None else f'end at step {end}'}, the checkpoint is of step {last}"
        )
        reached = [checkpoint for checkpoint, needed in good if needed <= commits]
        if reached and not done:
            for checkpoint, needed in good:
                if needed > commits:
                    self.actions.append(partial(self._move_to_backup, checkpoint.path))
            self._add(description, f"the checkpoint of step {reached[-1].step}, which they reach, is taken")
            return reached[-1].step
        self._add(description, "what is missing stays missing", partial(self._accept, good[-1][1]))
        return last

    # Repairs

    def _move_to_backup(self, path: Path) -> None:
        target = self.backup / path.relative_to(self.run)
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(path, target)

    def _write(self, name: str, value: Any) -> None:
        if (self.run / name).exists():
            self._move_to_backup(self.run / name)
        write_json(self.run / name, value)

    def _salvage(self, rows: list[tuple[str, int, float | None, float]]) -> None:
        for name in _DATABASE:
            if (self.run / name).exists():
                self._move_to_backup(self.run / name)
        start_metrics(self.run)
        with closing(sqlite3.connect(self.run / "metrics.db")) as connection, connection:
            connection.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)", rows)

    def _accept(self, commits: int) -> None:
        with closing(MetricsTable(self.run / "metrics.db", "a")) as metrics:
            metrics.set_commits(commits)


def _unreadable(path: Path) -> str | None:
    try:
        content = read_json(path)
    except RunError as error:
        return str(error)
    return None if isinstance(content, dict | list) else f"{path} is damaged: expected a JSON object"


def _readable_rows(path: Path) -> Iterator[tuple[str, int, float | None, float]]:
    """The readable rows of a damaged database: from the first row on up to the damage, and from the last row back to it."""
    rows: dict[tuple[str, int], tuple[str, int, float | None, float]] = {}
    for order in ("name, step", "name DESC, step DESC"):
        with suppress(sqlite3.Error, OSError), closing(_read_only(path)) as connection:
            for name, step, value, time in connection.execute(
                f"SELECT name, step, value, time FROM metrics ORDER BY {order}"
            ):
                right = isinstance(name, str) and isinstance(step, int) and 0 <= step <= MAX_STEP
                if right and isinstance(value, float | None) and isinstance(time, float):
                    rows[name, step] = (name, step, value, time)
    return iter(rows.values())
