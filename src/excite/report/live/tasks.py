"""Sweeps and studies below one folder, and how far they are, from the tasks.json that their engine keeps beside the runs."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from excite.runs.lock import held
from excite.tally import FILE, FORMAT, STATES

_DEPTH, _MOST, _LARGEST, _SHOWN = 5, 50, 16_000_000, 20
_FRESH = 120.0  # seconds after which one on another machine that said nothing is taken for stopped


def sweeps(root: Path) -> list[dict[str, Any]]:
    """One row each, those that were written last first: counts, time left, what runs and what failed."""
    found = []
    for folder in _walk(root, 0):
        row = _row(root, folder)
        if row is not None:
            found.append(row)
        if len(found) == _MOST:
            break
    return sorted(found, key=lambda row: -row["updated"])


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            inside = sorted(
                (e.name, e.is_dir(follow_symlinks=False), e.is_file(follow_symlinks=False)) for e in entries
            )
    except OSError:
        return
    if any(name == "run.json" for name, _, _ in inside):
        return
    if any(name == FILE and is_file for name, _, is_file in inside):
        yield folder
    elif depth < _DEPTH:
        for name, is_folder, _ in inside:
            if is_folder and not name.startswith("."):
                yield from _walk(folder / name, depth + 1)


def _row(root: Path, folder: Path) -> dict[str, Any] | None:
    """None for a file that is not ours, or damaged: the page has no use for it."""
    try:
        path = folder / FILE
        if path.stat().st_size > _LARGEST:
            return None
        told = json.loads(path.read_text())
        if told["format"] != FORMAT:
            return None
        tasks = [
            {**{key: str(task[key]) for key in ("name", "state", "phase", "log")}, "share": _finite(task["share"]),
             "reason": None if task["reason"] is None else str(task["reason"])}
            for task in told["tasks"]
        ]  # fmt: skip
        left = None if told["seconds_left"] is None else _finite(told["seconds_left"])
        updated = _finite(told["updated"])
        lock = folder / "lock"
        alive = held(lock) if lock.exists() else time.time() - updated < _FRESH
        state = "running" if alive and not told["ended"] else "done"
        counts = {kind: sum(task["state"] == kind for task in tasks) for kind in STATES}
        if state == "done" and counts["waiting"] + counts["running"]:
            state = "stopped"
        elif state == "done" and counts["failed"]:
            state = "failed"
        if state != "running":  # nobody works on these now
            counts["waiting"], counts["running"] = counts["waiting"] + counts["running"], 0
    except (OSError, ValueError, KeyError, TypeError):
        return None
    name = folder.relative_to(root).as_posix()
    for task in tasks:  # paths as seen from the folder
        task["log"] = str(task["log"]).replace(f"{root}{os.sep}", "")
    return {
        "id": name, "label": root.name if name == "." else name, "state": state, "updated": updated, "counts": counts,
        "left": left if state == "running" else None,
        "done": sum(float(str(task["share"])) for task in tasks), "total": len(tasks),
        "running": [task for task in tasks if task["state"] == "running"][:_SHOWN] if state == "running" else [],
        "failed": [task for task in tasks if task["state"] == "failed"][:_SHOWN],
    }  # fmt: skip


def _finite(value: Any) -> float:
    if not math.isfinite(number := float(value)):
        raise ValueError(f"expected a finite number; got {value!r}")
    return number
