"""What a report shows, read from run folders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from excite.errors import InputError, RunError
from excite.margin import Margins
from excite.report.curves import widest_gap
from excite.runs import Run, load_run
from excite.runs.copies import local_copy
from excite.runs.store import is_url

PARTS = ("train", "test")
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


def collect(paths: Iterable[str | Path]) -> list[Arm]:
    """The runs at `paths`, or in folders of runs, grouped into arms in the order given; those at URLs are copied here."""
    runs: list[Path] = []
    for given in (local_copy(str(path)) if is_url(path) else Path(path) for path in paths):
        inside = sorted(folder.parent for folder in given.glob("*/run.json")) if given.is_dir() else []
        runs += [given] if (given / "run.json").exists() or not inside else inside
    if not runs:
        raise InputError("report: expected at least one run folder")
    arms: dict[str, list[Seen]] = {}
    norm = (
        "inf" if any((path / f"artifacts/margins-inf-{part}.json").exists() for path in runs for part in PARTS) else "2"
    )
    for path in dict.fromkeys(runs):
        seen = _see(path, norm)
        arms.setdefault(seen.arm, []).append(seen)
    return [Arm(name, tuple(members)) for name, members in arms.items()]


def _see(path: Path, norm: str) -> Seen:
    with load_run(path) as run:
        summary = _artifact(run, "summary") or {}
        accuracy = summary.get("accuracy") or {}
        if not isinstance(accuracy, dict) or not all(isinstance(v, int | float) for v in accuracy.values()):
            raise RunError(f"{run.path}/artifacts/summary.json is damaged: delete it and measure again")
        wiring = _artifact(run, "wiring")
        if wiring is not None and not _is_wiring(wiring):
            raise RunError(f"{run.path}/artifacts/wiring.json is damaged: delete it and measure again")
        margins = {part: found for part in PARTS if (found := _margins(run, f"margins-{norm}-{part}")) is not None}
        return Seen(
            path=path,
            arm=str(summary.get("arm") or path.name),
            config=run.config,
            environment=run.environment,
            status=run.status,
            reason=run.reason,
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


def _artifact(run: Run, name: str) -> dict[str, Any] | None:
    if not (run.path / "artifacts" / f"{name}.json").exists():
        return None
    found = run.read_json(name)
    if not isinstance(found, dict):
        raise RunError(f"{run.path}/artifacts/{name}.json: expected a JSON object; delete it and measure again")
    return found


def _margins(run: Run, name: str) -> Margins | None:
    found = _artifact(run, name)
    if found is None:
        return None
    try:
        return Margins.from_dict(found)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{run.path}/artifacts/{name}.json does not hold margins ({error!r}): delete it and measure again"
        ) from error


def flat(settings: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as rows of dotted names and values."""
    if not isinstance(settings, dict):
        return [(prefix, str(settings))]
    return [row for key, value in settings.items() for row in flat(value, f"{prefix}.{key}" if prefix else str(key))]


def differing(columns: Sequence[dict[str, str]]) -> set[str]:
    """Names whose values are not the same in all columns."""
    names = {name for column in columns for name in column}
    return {name for name in names if len({column.get(name) for column in columns}) > 1}
