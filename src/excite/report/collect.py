"""What a report shows, read from run folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from excite._core.checks import shown
from excite._core.files import read_json
from excite.errors import InputError, RunError
from excite.margin import Margins
from excite.report.curves import widest_gap
from excite.runs import load_run
from excite.runs.copies import local_copy
from excite.runs.reader import standing
from excite.runs.run import check_folder_name
from excite.runs.store import is_url

PARTS = ("train", "test")
_MAX_SETTINGS, _MAX_ARTIFACT = 1_000_000, 64_000_000  # bytes, where files of others are read
Values = npt.NDArray[np.float64]
Series = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]


@dataclass(frozen=True)
class Seen:
    """One run as a report sees it. What was not measured is None or empty."""

    path: Path
    arm: str  # runs of one arm differ in their seed only
    config: dict[str, Any]
    environment: dict[str, Any]
    status: str
    reason: str | None
    margins: dict[str, Margins]  # "train", "test"
    accuracy: dict[str, float]  # "train", "test"
    wiring: dict[str, Any] | None

    @cached_property
    def metrics(self) -> dict[str, Series]:
        """Everything measured, by name; read when it is asked for."""
        with load_run(self.path) as run:
            return {name: run.series(name) for name in run.names()}

    def layers(self) -> list[str]:
        """Names of layers in the order of the wiring."""
        return [str(row["name"]) for row in self.wiring["layers"]] if self.wiring else []

    def by_layer(self, prefix: str) -> dict[str, Series]:
        """Metrics `prefix/layer` by layer, in the order of the wiring."""
        found = {
            name.removeprefix(prefix + "/"): s for name, s in self.metrics.items() if name.startswith(prefix + "/")
        }
        order = self.layers()
        return dict(sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


@dataclass(frozen=True)
class Arm:
    """Runs that were made the same way."""

    name: str
    runs: tuple[Seen, ...]

    def values(self, part: str) -> npt.NDArray[np.float64] | None:
        """Margins of all runs together."""
        found = [np.asarray(run.margins[part].values.cpu()) for run in self.runs if part in run.margins]
        return np.concatenate(found) if found else None

    def pairs(self) -> dict[object, tuple[Values, Values]]:
        """(training, test) margins of each run that has both, by the run's seed, or by number if seeds repeat."""
        found = [run for run in self.runs if {"train", "test"} <= run.margins.keys()]
        seeds: list[object] = [run.config.get("seed") for run in found]
        keys = seeds if len(set(seeds)) == len(seeds) and None not in seeds else range(len(found))
        return {
            key: (np.asarray(run.margins["train"].values), np.asarray(run.margins["test"].values))
            for key, run in zip(keys, found)
        }

    def gap(self) -> float | None:
        """Largest distance between the curves of training and test margins, points of all runs together."""
        pairs = list(self.pairs().values())
        if not pairs:
            return None
        train, test = (np.concatenate(values) for values in zip(*pairs))
        _, low, high = widest_gap(train, test)
        return high - low

    def accuracies(self, part: str) -> list[float]:
        return [run.accuracy[part] for run in self.runs if part in run.accuracy]


def collect(paths: Iterable[str | Path], below: Path | None = None) -> list[Arm]:
    """The runs at `paths`, or in folders of runs, grouped into arms in the order given; those at URLs are copied here.

    With `below`, a folder above all of them, no symbolic link from there on is followed, large files are refused, and
    metrics are not checked.
    """
    if isinstance(paths, str | Path) or not isinstance(paths, Iterable):
        raise InputError(f"paths: expected a list of run folders; got {shown(paths)}")
    runs: list[Path] = []
    for given in (local_copy(str(path)) if is_url(path) else check_folder_name(path) for path in paths):
        inside = sorted(folder.parent for folder in given.glob("*/run.json")) if given.is_dir() else []
        runs += [given] if (given / "run.json").exists() or not inside else inside
    if not runs:
        raise InputError("report: expected at least one run folder")
    arms: dict[str, list[Seen]] = {}
    norm = (
        "inf" if any((path / f"artifacts/margins-inf-{part}.json").exists() for path in runs for part in PARTS) else "2"
    )
    for path in dict.fromkeys(runs):
        seen = _see(path, norm, below)
        arms.setdefault(seen.arm, []).append(seen)
    return [Arm(name, tuple(members)) for name, members in arms.items()]


def _see(path: Path, norm: str, below: Path | None) -> Seen:
    if below is None:
        load_run(path).close()  # says what is wrong with the metrics

    def read(name: str, max_bytes: int = _MAX_SETTINGS) -> dict[str, Any]:
        value = read_json(path / name, below, None if below is None else max_bytes)
        if not isinstance(value, dict):
            raise RunError(f"{path / name} is damaged: expected a JSON object")
        return value

    def artifact(name: str) -> dict[str, Any] | None:
        name = f"artifacts/{name}.json"
        return read(name, _MAX_ARTIFACT) if os.path.lexists(path / name) else None

    summary = artifact("summary") or {}
    accuracy = summary.get("accuracy") or {}
    if not isinstance(accuracy, dict) or not all(isinstance(v, int | float) for v in accuracy.values()):
        raise RunError(f"{path}/artifacts/summary.json is damaged: delete it and measure again")
    wiring = artifact("wiring")
    if wiring is not None and not _is_wiring(wiring):
        raise RunError(f"{path}/artifacts/wiring.json is damaged: delete it and measure again")
    margins = {}
    for part in PARTS:
        stored = artifact(f"margins-{norm}-{part}")
        if stored is not None:
            margins[part] = _margins(stored, f"{path}/artifacts/margins-{norm}-{part}.json")
    status, reason = standing(path, below)
    return Seen(
        path=path,
        arm=str(summary.get("arm") or path.name),
        config=read("config.json"),
        environment=read("environment.json"),
        status="stopped" if status == "stale" else status,
        reason=reason,
        margins=margins,
        accuracy={part: float(value) for part, value in accuracy.items()},
        wiring=wiring,
    )


def _is_wiring(found: dict[str, Any]) -> bool:
    keys = {
        "layers": {"name", "kind", "in", "out", "parameters"},
        "groups": {"channels", "producers", "consumers", "law", "why"},
    }
    for part, wanted in keys.items():
        rows = found.get(part)
        if not isinstance(rows, list) or not all(isinstance(row, dict) and wanted <= row.keys() for row in rows):
            return False
    return all(isinstance(row[key], list) for row in found["groups"] for key in ("producers", "consumers"))


def _margins(stored: dict[str, Any], name: str) -> Margins:
    try:
        return Margins.from_dict(stored)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{name} does not hold margins ({error!r}): delete it and measure again") from error


def flat(settings: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as rows of dotted names and values."""
    if not isinstance(settings, dict):
        return [(prefix, str(settings))]
    return [row for key, value in settings.items() for row in flat(value, f"{prefix}.{key}" if prefix else str(key))]


def differing(columns: Sequence[dict[str, str]]) -> set[str]:
    """Names whose values are not the same in all columns."""
    names = {name for column in columns for name in column}
    return {name for name in names if len({column.get(name) for column in columns}) > 1}
