"""Reads what a report shows from run folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
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
from excite.margin.normalize import Unit
from excite.report.curves import widest_gap
from excite.runs import load_run
from excite.runs.copies import local_copy
from excite.runs.folder import check_folder_name
from excite.runs.reader import read_status
from excite.runs.store import is_url

PARTS = ("train", "test")
_MAX_SETTINGS, _MAX_ARTIFACT = 1_000_000, 64_000_000  # bytes, where files of others are read
Values = npt.NDArray[np.float64]
Series = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]


@dataclass(frozen=True)
class RunData:
    """Config, status and measurements of one run. Quantities that were not measured are None or empty."""

    path: Path
    variant: str  # runs of one variant differ only in their seed
    config: dict[str, Any]
    environment: dict[str, Any]
    status: str
    reason: str | None
    margins: dict[str, Margins]  # "train", "test"
    accuracy: dict[str, float]  # "train", "test"
    wiring: dict[str, Any] | None
    note: str = ""  # on accuracies that are left out

    @cached_property
    def metrics(self) -> dict[str, Series]:
        """All series by the name of the metric, read on first access."""
        with load_run(self.path) as run:
            return {name: run.series(name) for name in run.names()}

    def layers(self) -> list[str]:
        """Names of the layers in the order of the wiring."""
        return [str(row["name"]) for row in self.wiring["layers"]] if self.wiring else []

    def roles(self) -> dict[str, str]:
        """What layers, heads and laws do, by name; empty where that is not known."""
        return wiring_roles(self.wiring)

    def settings(self) -> dict[str, str]:
        """Settings by dotted name; of a watched run those of the training first, as `watch(config=...)` was given them."""
        own = self.config.get("config") if "watch" in self.config else None
        if not isinstance(own, dict):
            return dict(flat(self.config))
        others = {key: value for key, value in self.config.items() if key != "config"}
        return dict([*flat(own), *flat(others)])

    def by_layer(self, prefix: str) -> dict[str, Series]:
        """Metrics `prefix/layer` by layer, in the order of the wiring."""
        result = {
            name.removeprefix(prefix + "/"): s for name, s in self.metrics.items() if name.startswith(prefix + "/")
        }
        order = self.layers()
        return dict(sorted(result.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


@dataclass(frozen=True)
class VariantRuns:
    """The runs of one variant: the same settings, different seeds."""

    name: str
    runs: tuple[RunData, ...]

    def values(self, split: str) -> npt.NDArray[np.float64] | None:
        """Margins of all runs, concatenated; None if no run has any."""
        result = [np.asarray(run.margins[split].values.cpu()) for run in self.runs if split in run.margins]
        return np.concatenate(result) if result else None

    def pairs(self) -> dict[object, tuple[Values, Values]]:
        """(training, test) margins of each run that has both, keyed by the run's seed, or by index if seeds repeat."""
        result = [run for run in self.runs if {"train", "test"} <= run.margins.keys()]
        seeds: list[object] = [run.config.get("seed") for run in result]
        keys = seeds if len(set(seeds)) == len(seeds) and None not in seeds else range(len(result))
        return {
            key: (np.asarray(run.margins["train"].values), np.asarray(run.margins["test"].values))
            for key, run in zip(keys, result)
        }

    def gap(self) -> float | None:
        """Largest distance between the curves of training and test margins, over the points of all runs."""
        pairs = list(self.pairs().values())
        if not pairs:
            return None
        train, test = (np.concatenate(values) for values in zip(*pairs))
        _, low, high = widest_gap(train, test)
        return high - low

    def accuracies(self, split: str) -> list[float]:
        """Accuracy of each run that has one, on "train" or "test" data."""
        return [run.accuracy[split] for run in self.runs if split in run.accuracy]


def wiring_roles(wiring: Any) -> dict[str, str]:
    """Roles by name of a stored wiring; those that are damaged, or of earlier versions, are left out."""
    rows = wiring.get("roles") if isinstance(wiring, dict) else None
    known = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return {str(row["name"]): str(row["role"]) for row in known if row.get("name") and row.get("role")}


def collect(paths: Iterable[str | Path], below: Path | None = None) -> list[VariantRuns]:
    """Reads runs and groups them by variant, in the order of `paths`.

    Args:
        paths: Run folders, folders of runs, or URLs; runs at URLs are copied to the local disk first.
        below: A folder above all of them. Then no symbolic link below it is followed, large files are refused, and
            metrics are not checked. For runs that others can write.

    Returns:
        One entry per variant.

    Raises:
        InputError: If `paths` is not a list or holds no run.
        RunError: If a run folder is damaged.
    """
    if isinstance(paths, str | Path) or not isinstance(paths, Iterable):
        raise InputError(f"paths: expected a list of run folders; got {shown(paths)}")
    runs: list[Path] = []
    for folder in (local_copy(str(path)) if is_url(path) else check_folder_name(path) for path in paths):
        inside = sorted(file.parent for file in folder.glob("*/run.json")) if folder.is_dir() else []
        runs += [folder] if (folder / "run.json").exists() or not inside else inside
    if not runs:
        raise InputError("report: expected at least one run folder")
    variants: dict[str, list[RunData]] = {}
    norm = stored_norm(runs)
    for path in dict.fromkeys(runs):
        run = _read_run(path, norm, below)
        variants.setdefault(run.variant, []).append(run)
    return [VariantRuns(name, tuple(members)) for name, members in variants.items()]


def _read_run(path: Path, norm: str, below: Path | None) -> RunData:
    if below is None:
        load_run(path).close()  # raises if the metrics are damaged

    def artifact(name: str) -> dict[str, Any] | None:
        file = path / "artifacts" / f"{name}.json"
        return _object(file, below, _MAX_ARTIFACT) if os.path.lexists(file) else None

    summary = artifact("summary") or {}
    accuracy = _accuracy(summary, path)
    wiring = artifact("wiring")
    if wiring is not None and not _is_wiring(wiring):
        raise RunError(f"{path}/artifacts/wiring.json is damaged: delete it and measure again")
    status, reason = read_status(path, below)
    return RunData(
        path=path,
        variant=str(summary.get("variant") or summary.get("arm") or path.name),
        config=_object(path / "config.json", below, _MAX_SETTINGS),
        environment=_object(path / "environment.json", below, _MAX_SETTINGS),
        status="stopped" if status == "stale" else status,
        reason=reason,
        margins=stored_margins(path, below, _MAX_ARTIFACT, norm),
        accuracy=fractions(accuracy),
        note=not_fractions(accuracy),
        wiring=wiring,
    )


def stored_norm(paths: Iterable[Path]) -> str:
    """The norm of stored margins: "inf" if any of the runs has such margins, else "2"."""
    files = (path / "artifacts" / f"margins-inf-{split}.json" for path in paths for split in PARTS)
    return "inf" if any(file.exists() for file in files) else "2"


def stored_margins(path: Path, below: Path | None, max_bytes: int, norm: str | None = None) -> dict[str, Margins]:
    """Margins among a run's artifacts, by part.

    Args:
        path: The run folder.
        below: See `collect`.
        max_bytes: Larger files are refused, if `below` is given.
        norm: The norm; by default "inf" if the run has such margins.

    Raises:
        RunError: If a file is damaged or too large.
    """
    norm = norm or stored_norm([path])
    result = {}
    for split in PARTS:
        file = path / "artifacts" / f"margins-{norm}-{split}.json"
        if os.path.lexists(file):
            result[split] = _margins(_object(file, below, max_bytes), str(file))
    return result


def stored_accuracy(path: Path, below: Path | None) -> dict[str, float]:
    """Accuracy by part, from a run's summary; empty if it has none."""
    file = path / "artifacts" / "summary.json"
    return fractions(_accuracy(_object(file, below, _MAX_ARTIFACT), path)) if os.path.lexists(file) else {}


def _object(file: Path, below: Path | None, max_bytes: int) -> dict[str, Any]:
    value = read_json(file, below, None if below is None else max_bytes)
    if not isinstance(value, dict):
        raise RunError(f"{file} is damaged: expected a JSON object")
    return value


def watched_unit(config: Mapping[str, Any]) -> Unit | None:
    """The unit of the margins that `excite.watch` measures, from the config of a run; None if it does not say."""
    try:
        unit = config["watch"]["margins"]["unit"]
        return Unit(float(unit["low"]), float(unit["high"]), bool(unit["pixels"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def stored_unit(path: Path, below: Path | None) -> Unit | None:
    """The same of the run in a folder."""
    return watched_unit(_object(path / "config.json", below, _MAX_SETTINGS))


def not_fractions(accuracy: Mapping[str, float]) -> str:
    """A sentence on values that are no fractions of points, such as percentages, which pages leave out; empty if all are."""
    wrong = [value for value in accuracy.values() if not 0 <= value <= 1]
    if not wrong:
        return ""
    advice = f": log {wrong[0] / 100:.4g} for {wrong[0]:.4g} %" if 1 < wrong[0] <= 100 else ""
    return f"An accuracy of {wrong[0]:.4g} is not a fraction between 0 and 1 and is left out{advice}."


def fractions(accuracy: Mapping[str, float]) -> dict[str, float]:
    """The values that are fractions."""
    return {split: value for split, value in accuracy.items() if 0 <= value <= 1}


def _accuracy(summary: dict[str, Any], path: Path) -> dict[str, float]:
    accuracy = summary.get("accuracy") or {}
    if not isinstance(accuracy, dict) or not all(isinstance(v, int | float) for v in accuracy.values()):
        raise RunError(f"{path}/artifacts/summary.json is damaged: delete it and measure again")
    return {split: float(value) for split, value in accuracy.items()}


def _is_wiring(wiring: dict[str, Any]) -> bool:
    keys = {
        "layers": {"name", "kind", "in", "out", "parameters"},
        "groups": {"channels", "producers", "consumers", "law", "why"},
    }
    for name, required in keys.items():
        rows = wiring.get(name)
        if not isinstance(rows, list) or not all(isinstance(row, dict) and required <= row.keys() for row in rows):
            return False
    return all(isinstance(row[key], list) for row in wiring["groups"] for key in ("producers", "consumers"))


def _margins(stored: dict[str, Any], name: str) -> Margins:
    try:
        return Margins.from_dict(stored)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{name} does not hold margins ({error!r}): delete it and measure again") from error


def flat(settings: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Flattens nested settings into (dotted name, value) rows."""
    if not isinstance(settings, dict):
        return [(prefix, str(settings))]
    return [row for key, value in settings.items() for row in flat(value, f"{prefix}.{key}" if prefix else str(key))]


def differing(columns: Sequence[dict[str, str]]) -> set[str]:
    """Names whose values differ between columns."""
    names = {name for column in columns for name in column}
    return {name for name in names if len({column.get(name) for column in columns}) > 1}
