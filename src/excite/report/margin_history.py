"""Training and test margins over the steps of a run, and their gap: the first chart of a page."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from excite.report.subsample import between, extremes, plain
from excite.report.view import RunView
from excite.runs.reader import MetricsReader

METRICS = {
    "train": "margin_gap/median/train",
    "test": "margin_gap/median/test",
    "gap": "margin_gap/gap",
    "chance": "margin_gap/chance",
}
_COUNT = "margin_gap/points/{part}"
_POINTS = 500  # of a curve
_APART = 20  # measurements beside the curves, at most


def margin_history(runs: Sequence[RunView]) -> list[dict[str, Any]]:
    """Median margins of training and test points, their gap and its chance level, for the runs that measured any.

    A measurement of another number of points than the first one, such as the one at the end, is no point of the curves: it
    samples other points, so that a step between the two says nothing about the network.

    Args:
        runs: The runs of a page.

    Returns:
        One entry per run: its index `run`; of each of "train", "test", "gap" and "chance" that was measured the curve
        {"x": steps, "y": values}; `points`, the number of points of these, and `apart`, the measurements of another number:
        {"step", "points", "train", "test", "gap", "chance"}. Both are missing where the number is not known.
    """
    result = []
    for i, run in enumerate(runs):
        available = set(run.metrics_reader.names())
        names = {split: name for split, name in METRICS.items() if name in available}
        if names.keys() & {"train", "test"}:
            result.append({"run": i, **_split(run.metrics_reader, names, available)})
    return result


def _split(metrics_reader: MetricsReader, names: Mapping[str, str], available: Collection[str]) -> dict[str, Any]:
    counts = [_COUNT.format(part=data_split) for data_split in ("train", "test") if data_split in names]
    known = [name for name in counts if name in available]
    if not known or metrics_reader.binned(known[0], _POINTS // 2 - 1, None, None) is not None:
        return {data_split: _curve(metrics_reader, name) for data_split, name in names.items()}
    sizes: dict[int, int] = {}  # points per part, the smaller of both, by step
    for name in known:
        for step, count in zip(*metrics_reader.series(name)):
            if np.isfinite(count):
                sizes[int(step)] = min(int(count), sizes.get(int(step), int(count)))
    if not sizes:
        return {data_split: _curve(metrics_reader, name) for data_split, name in names.items()}
    usual = sizes[min(sizes)]
    other = {step: count for step, count in sorted(sizes.items()) if count != usual}
    curves: dict[str, Any] = {}
    apart: dict[int, dict[str, Any]] = {step: {"step": step, "points": count} for step, count in other.items()}
    for data_split, name in names.items():
        steps, values = metrics_reader.series(name)
        for step, value in zip(steps, values):
            if int(step) in apart:
                apart[int(step)][data_split] = float(value) if np.isfinite(value) else None
        joined = ~np.isin(steps, list(other))
        curves[data_split] = _listed(steps[joined], values[joined])
    return {**curves, "points": usual, "apart": list(apart.values())[-_APART:]}


def _curve(metrics_reader: MetricsReader, name: str) -> dict[str, list[Any]]:
    binned = metrics_reader.binned(name, _POINTS // 2 - 1, None, None)
    return _listed(*(metrics_reader.series(name) if binned is None else between(*binned)))


def _listed(steps: Any, values: Any) -> dict[str, list[Any]]:
    steps, values = extremes(steps, values, _POINTS)
    return {"x": plain(steps), "y": plain(values)}
