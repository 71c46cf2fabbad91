"""The files of a run folder, except metrics and checkpoints: creating them, and checks of what is in them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from excite._core.checks import shown
from excite._core.files import read_json, write_json, writing
from excite.errors import InputError, RunError
from excite.runs import checkpoints
from excite.runs.checks import check_version
from excite.runs.environment import environment
from excite.runs.lock import Lock
from excite.runs.metrics import MetricsTable

Status = Literal["running", "done", "failed", "stopped"]
FORMAT, VERSION = "excite-run", 1
STATUSES = ("running", "done", "failed", "stopped")
_LONGEST_NAME = 255  # bytes


def build(folder: Path, config: dict[str, Any], target: Path) -> Lock:
    """Writes all files of a new run into `folder`, and returns its lock, which stays held when the folder is renamed to `target`."""
    with writing(target):
        folder.chmod(0o755)
        (folder / "checkpoints").mkdir()
        (folder / "artifacts").mkdir()
    lock = Lock(folder / "lock", target)
    try:
        write_json(folder / "config.json", config)
        write_json(folder / "environment.json", environment())
        MetricsTable(folder / "metrics.db", "x").close()
        write_json(folder / "run.json", new_marker("running"))
    except BaseException:
        lock.release()
        raise
    return lock


def normalized_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config as read back from config.json: tuples are lists, keys are text."""
    try:
        return dict(json.loads(json.dumps(dict(config))))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"config.json: cannot be written as JSON: {error}") from error


def first_difference(stored: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> str:
    """The first setting that differs, with both values, in words; empty if all are equal."""
    for key in {**stored, **new}:
        a, b = stored.get(key), new.get(key)
        if equal_values(a, b):
            continue
        if isinstance(a, dict) and isinstance(b, dict) and (inside := first_difference(a, b, f"{prefix}{key}.")):
            return inside
        return f"{prefix}{key}: {a!r} in the run, {b!r} now"
    return ""


def equal_values(a: Any, b: Any) -> bool:
    """Whether two JSON values are equal, where NaN equals itself."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal_values(value, b[key]) for key, value in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal_values, a, b))
    return bool(a == b or (a != a and b != b))


def check_marker(run: Path) -> Status:
    """Checks that run.json belongs to a run of a known format version, and returns the status in it."""
    marker = read_mapping(run / "run.json")
    if marker.get("format") != FORMAT:
        raise RunError(f"{run} is not a run folder of Excite: its run.json belongs to something else")
    check_version(run, marker.get("version"), VERSION)
    status: Any = marker.get("status")
    if status not in STATUSES:
        raise RunError(f"{run / 'run.json'} is damaged: its status is {marker.get('status')!r}")
    return status  # type: ignore[no-any-return]


def new_marker(status: Status, reason: str | None = None) -> dict[str, Any]:
    """Returns the content of run.json."""
    marker = {"format": FORMAT, "version": VERSION, "status": status, "reason": reason}
    return {**marker, "created": timestamp(), "changed": timestamp()}


def check_folder_name(path: str | os.PathLike[str]) -> Path:
    """Returns the path if a folder can have it: names have at most 255 bytes and no null character."""
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise InputError(f"expected the path of a run folder; got {shown(path)}")
    folder = Path(path)
    for name in folder.parts:
        if len(os.fsencode(name)) > _LONGEST_NAME:
            raise InputError(
                f"the name {name[:30]}… has {len(os.fsencode(name))} bytes, and file systems take {_LONGEST_NAME}: choose a shorter one"
            )
        if "\0" in name:
            raise InputError(f"expected a folder's name without null characters; got {name[:60]!r}")
    return folder


def start_metrics(run: Path) -> None:
    """Creates an empty metrics.db for a run that lost its own, such that its checkpoints can still be loaded."""
    for leftover in ("metrics.db-wal", "metrics.db-shm"):
        with contextlib.suppress(OSError):
            (run / leftover).unlink()
    known = [0]
    for checkpoint in checkpoints.find(run / "checkpoints"):
        with contextlib.suppress(RunError):
            known.append(checkpoints.read_with_commits(checkpoint.path)[2])
    MetricsTable(run / "metrics.db", "x", max(known)).close()


def refuse_existing(target: Path) -> None:
    """Raises a RunError if there is something at `target` other than an empty folder."""
    with writing(target):
        if not target.exists() and not target.is_symlink():
            return
        if (target / "run.json").exists():
            raise RunError(f"{target} holds a run already: choose another folder, or continue it with resume=True")
        if not target.is_dir() or target.is_symlink():
            raise RunError(f"{target} exists and is not a directory: choose another name")
        if any(target.iterdir()):
            raise RunError(f"{target} is not empty and not a run of Excite: choose another folder")


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise RunError(f"{path} is damaged: expected a JSON object")
    return value


def timestamp() -> str:
    """Returns the time in UTC, as run.json holds it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
