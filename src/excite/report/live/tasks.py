"""Progress of the sweeps and studies below one folder, from the tasks.json that the scheduler writes beside the runs."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from excite._core.files import read_json
from excite.jobs.progress import FILE, FORMAT, STATUSES
from excite.report.live.folder import folders_in
from excite.runs.lock import is_held

_DEPTH, _MAX_SWEEPS, _MAX_BYTES, _MAX_SHOWN = 5, 50, 16_000_000, 20
_MAX_FOLDERS = 20_000
_FRESH = 120.0  # seconds after which one on another machine without news counts as stopped


def sweeps(root: Path) -> list[dict[str, Any]]:
    """One row each, those that were written last first: counts, time left, what runs and what failed."""
    result = []
    for folder in _walk(root):
        row = _row(root, folder)
        if row is not None:
            result.append(row)
        if len(result) == _MAX_SWEEPS:
            break
    return sorted(result, key=lambda row: -row["updated"])


def _walk(root: Path) -> Iterator[Path]:
    folders = [(root, 0)]  # still to be searched, the last one first
    for _ in range(_MAX_FOLDERS):
        if not folders:
            return
        folder, depth = folders.pop()
        if os.path.lexists(folder / "run.json"):
            continue
        if os.path.lexists(folder / FILE) and not (folder / FILE).is_symlink():
            yield folder
        elif depth < _DEPTH:
            folders += [(folder / name, depth + 1) for name in reversed(folders_in(folder))]


def _row(root: Path, folder: Path) -> dict[str, Any] | None:
    """None for a file of another program, or a damaged one."""
    try:
        stored = read_json(folder / FILE, root, _MAX_BYTES)
        if stored["format"] != FORMAT:
            return None
        tasks = [
            {**{key: str(task[key]) for key in ("name", "state", "phase", "log")}, "share": min(max(_finite(task["share"]), 0.0), 1.0),
             "reason": None if task["reason"] is None else str(task["reason"])}
            for task in stored["tasks"]
        ]  # fmt: skip
        seconds_left = None if stored["seconds_left"] is None else _finite(stored["seconds_left"])
        updated = _finite(stored["updated"])
        lock = folder / "lock"
        alive = is_held(lock) if lock.exists() else time.time() - updated < _FRESH
        state = "running" if alive and not stored["ended"] else "done"
        counts = {status: sum(task["state"] == status for task in tasks) for status in STATUSES}
        if state == "done" and counts["waiting"] + counts["running"]:
            state = "stopped"
        elif state == "done" and counts["failed"]:
            state = "failed"
        if state != "running":  # no process works on these now
            counts["waiting"], counts["running"] = counts["waiting"] + counts["running"], 0
    except Exception:  # whatever a damaged file can cause
        return None
    name = folder.relative_to(root).as_posix()
    for task in tasks:  # paths as seen from the folder
        task["log"] = str(task["log"]).replace(f"{root}{os.sep}", "")
    return {
        "id": name, "label": root.name if name == "." else name, "state": state, "updated": updated, "counts": counts,
        "left": seconds_left if state == "running" else None,
        "done": sum(float(str(task["share"])) for task in tasks), "total": len(tasks),
        "running": [task for task in tasks if task["state"] == "running"][:_MAX_SHOWN] if state == "running" else [],
        "failed": [task for task in tasks if task["state"] == "failed"][:_MAX_SHOWN],
    }  # fmt: skip


def _finite(value: Any) -> float:
    if not math.isfinite(number := float(value)):
        raise ValueError(f"expected a finite number; got {value!r}")
    return number
