"""Opening, locking and closing of a run folder, and the status that it stores."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from excite._core.checks import check_flag
from excite._core.files import TEMPORARY, remove_temporary, sync_folder, write_json, writing
from excite.errors import InputError, RunError, one_line
from excite.runs.checks import check_keep
from excite.runs.folder import (
    STATUSES,
    Status,
    build,
    check_folder_name,
    check_marker,
    first_difference,
    normalized_config,
    read_mapping,
    refuse_existing,
    start_metrics,
    timestamp,
)
from excite.runs.lock import Lock, is_held
from excite.runs.metrics import MetricsTable

_MEANT_URL = re.compile(r"[a-z][a-z0-9+.-]+:/")  # a Path of a URL has one slash left


class RunLifecycle:
    """The part of `Run` that opens a folder, holds its lock, and stores how the run ended."""

    def __init__(self, path: Path, mode: Literal["r", "a"], lock: Lock | None, *, resumed: bool, keep: int) -> None:
        self.path, self.mode = path, mode
        self.resumed = resumed  # opened again, rather than just created
        self.keep = keep
        self._lock = lock
        self._closed = False
        self._check_marker()
        self.config: dict[str, Any] = read_mapping(path / "config.json")
        self.environment: dict[str, Any] = read_mapping(path / "environment.json")
        if mode == "a" and not (path / "metrics.db").is_file():
            warnings.warn(
                f"{path}: metrics.db is missing, so what was measured before is lost: a new table is started",
                stacklevel=4,
            )
            start_metrics(path)
        self._metrics = MetricsTable(path / "metrics.db", mode)
        if mode == "a":
            for folder in (path, self._checkpoint_folder, path / "artifacts"):
                remove_temporary(folder)

    # Opening and closing

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], config: Mapping[str, Any], *, resume: bool = False, keep: int = 2
    ) -> Self:
        """Creates a run folder and opens it for writing. The folder appears complete or not at all.

        Args:
            path: Folder; must not exist, or be empty.
            config: Config of the run, as JSON values.
            resume: Whether to open the run for writing if it exists and was made by an equal config.
            keep: Number of checkpoints kept beside the final one.

        Returns:
            The run, open for writing, with status "running".

        Raises:
            InputError: If the path or the config is invalid.
            RunError: If the folder exists and cannot be resumed, cannot be written, or another process is writing to it.
        """
        target = check_folder_name(path)
        if _MEANT_URL.match(str(path)):
            raise InputError(
                f"{path}: a training writes to a folder of this machine; sweeps and studies take a URL as --out"
            )
        check_keep(keep)
        if check_flag(resume, "resume") and (target / "run.json").exists():
            return cls._resume(target, config, keep)
        try:
            lock = cls._build(target, config)
        except RunError:
            if resume and (target / "run.json").exists():  # another process was faster
                return cls._resume(target, config, keep)
            raise
        sync_folder(target.parent)
        if os.name == "nt":
            lock = Lock(target / "lock", target)
        return cls._opened(target, "a", lock, resumed=False, keep=keep)

    @staticmethod
    def _build(target: Path, config: Mapping[str, Any]) -> Lock:
        """Builds a run folder beside `target` and renames it; returns its lock, which is held."""
        refuse_existing(target)
        with writing(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            building = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{target.name[:40]}-", dir=target.parent))
        lock: Lock | None = None
        try:
            lock = build(building, dict(config), target)
            if os.name == "nt":
                lock.release()  # Windows does not rename folders with open files
            with writing(target):
                try:
                    os.rename(building, target)
                except OSError:
                    refuse_existing(target)  # another process was faster
                    raise
        except BaseException:
            if lock is not None:
                lock.release()
            shutil.rmtree(building, ignore_errors=True)
            raise
        return lock

    @classmethod
    def _resume(cls, target: Path, config: Mapping[str, Any], keep: int) -> Self:
        """Opens a run that exists for writing, if it was made by an equal config."""
        run = cls.open(target, "a", keep=keep)
        try:
            run._check_config(config)
            run.set_status("running")
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str], mode: Literal["r", "a"] = "r", *, keep: int = 2) -> Self:
        """Opens an existing run.

        Args:
            path: Run folder.
            mode: "r" for reading, also while another process writes; "a" for writing, one process at a time.
            keep: Number of checkpoints kept beside the final one.

        Returns:
            The run.

        Raises:
            InputError: If `mode` or `keep` is invalid.
            RunError: If there is no run folder, it is damaged, or (mode "a") another process is writing to it.
        """
        if mode not in ("r", "a"):
            raise InputError(f"mode: expected 'r' or 'a'; got {mode!r}")
        check_keep(keep)
        target = check_folder_name(path)
        if not target.is_dir():
            raise RunError(f"there is no run folder at {target}" + (": it is a file" if target.exists() else ""))
        if not (target / "run.json").is_file():
            raise RunError(f"{target} is not a run folder of Excite: it has no run.json")
        lock = Lock(target / "lock", target) if mode == "a" else None
        return cls._opened(target, mode, lock, resumed=True, keep=keep)

    @classmethod
    def _opened(cls, path: Path, mode: Literal["r", "a"], lock: Lock | None, *, resumed: bool, keep: int) -> Self:
        try:
            return cls(path, mode, lock, resumed=resumed, keep=keep)
        except BaseException:
            if lock is not None:
                lock.release()
            raise

    def close(self, status: Status | None = None, reason: str | None = None) -> None:
        """Writes buffered metrics and releases the lock. Closing twice does nothing.

        Args:
            status: Status to set.
            reason: Why the run failed or stopped, in one line.

        Raises:
            RunError: If the metrics or the status cannot be written.
        """
        if self._closed:
            return
        try:
            self._metrics.close()
            if status is not None:
                self.set_status(status, reason)
        finally:
            self._closed = True
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.mode == "r" or self._closed:
            self.close()
        elif error is None:
            self.close("done" if self._check_marker() == "running" else None)
        else:
            # The error under way matters more than one that closing may add (a full disk fails twice).
            with contextlib.suppress(RunError):
                if self._check_marker() == "running":
                    self.set_status("stopped" if isinstance(error, KeyboardInterrupt) else "failed", one_line(error))
            with contextlib.suppress(RunError):
                self.close()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, mode={self.mode!r}, status={self.status!r})"

    # Status

    @property
    def status(self) -> Status:
        """Status: "running", "done", "failed" or "stopped". A run whose process was killed is "stopped".

        A copy from a store has no lock file: its status is the one that was stored.
        """
        stored = self._check_marker()
        lock = self.path / "lock"
        if stored == "running" and lock.exists() and not is_held(lock):
            return "stopped"
        return stored

    @property
    def reason(self) -> str | None:
        """Why a run failed or stopped, in one line."""
        reason = read_mapping(self.path / "run.json").get("reason")
        return None if reason is None else str(reason)

    def set_status(self, status: Status, reason: str | None = None) -> None:
        """Stores the status.

        Args:
            status: "running", "done", "failed" or "stopped".
            reason: Why the run failed or stopped, in one line.

        Raises:
            InputError: If the status is unknown.
            RunError: If the run is not open for writing, or cannot be written.
        """
        self._writable()
        if status not in STATUSES:
            raise InputError(f"status: expected one of {', '.join(STATUSES)}; got {status!r}")
        marker = read_mapping(self.path / "run.json")
        write_json(self.path / "run.json", {**marker, "status": status, "reason": reason, "changed": timestamp()})

    # Checks

    @property
    def _checkpoint_folder(self) -> Path:
        return self.path / "checkpoints"

    def _writable(self) -> None:
        if self.mode == "r" or self._closed:
            state = "closed" if self._closed else "open for reading"
            raise RunError(f"{self.path} is {state}: open it with Run.open(path, 'a') to write")

    def _check_marker(self) -> Status:
        return check_marker(self.path)

    def _check_config(self, config: Mapping[str, Any]) -> None:
        if changed := self.changed_settings(config):
            raise RunError(
                f"{self.path} was made with another config ({changed}): choose another folder, or use the same config to "
                "continue it"
            )

    def changed_settings(self, config: Mapping[str, Any]) -> str:
        """The first setting that differs between the run's config and another one, in words; empty if they are equal."""
        return first_difference(self.config, normalized_config(config))
