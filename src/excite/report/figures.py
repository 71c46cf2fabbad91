"""Charts of margins as data; `static/charts.js` draws them.

A chart is {"x": axis, "y": axis, "series": [...]}. An axis has a `label` and may have `log`, `percent`, `zero` (starts at
0), `whole` (integers), `min` and `max`. A series has `name`, `x`, `y`, `colour` (an index into the palette) and may have
`dash`, `width`, `step` (constant between points), `fill` and `vertical`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from excite.report.collect import VariantRuns
from excite.report.curves import curve, thin, widest_gap
from excite.report.subsample import plain

Chart = dict[str, Any]
NAMES = {"train": "training points", "test": "test points"}
_GREY, _MAX_POINTS = 6, 500


def series(name: str, x: npt.NDArray[Any], y: npt.NDArray[Any], colour: int, **options: Any) -> dict[str, Any]:
    """One line of a chart, with at most about 500 points.

    Args:
        name: Text of the legend.
        x: Ascending positions.
        y: Values; those that are not finite become gaps.
        colour: Index into the palette.
        **options: Any of `dash`, `width`, `step`, `fill`, `vertical`.

    Returns:
        The series as JSON.
    """
    return {
        "name": name,
        "x": plain(thin(x, _MAX_POINTS)),
        "y": plain(thin(y, _MAX_POINTS)),
        "colour": colour,
        **options,
    }


def vertical(name: str, x: float, low: float, high: float, colour: int, dash: int = 2) -> dict[str, Any]:
    """A vertical line from `low` to `high`."""
    return series(name, np.array([x, x]), np.array([low, high]), colour, dash=dash, vertical=True)


def largest(values: Sequence[npt.NDArray[np.float64]]) -> float:
    """The end of the axis of margins: a little beyond the largest finite one; 1 if there is none above 0."""
    every = np.concatenate(values) if values else np.empty(0)
    finite = every[np.isfinite(every)]
    return float(finite.max()) * 1.05 if finite.size and finite.max() > 0 else 1.0


def margin_curves(variants: Sequence[VariantRuns]) -> list[Chart]:
    """One chart per variant: fraction of points misclassified within ε on training and test data, and their largest distance."""
    result = {
        variant.name: {split: values for split in NAMES if (values := variant.values(split)) is not None}
        for variant in variants
    }
    shown = {name: curves for name, curves in result.items() if curves}
    widest = largest([values for curves in shown.values() for values in curves.values()])
    return [_margins(name if len(variants) > 1 else "", curves, widest) for name, curves in shown.items()]


def _margins(title: str, curves: Mapping[str, npt.NDArray[np.float64]], widest: float) -> Chart:
    lines = [
        series(NAMES[split], *curve(values, widest), int(split == "test"), step=True)
        for split, values in curves.items()
    ]
    if len(curves) == 2:
        at, low, high = widest_gap(curves["train"], curves["test"])
        lines.append(vertical(f"largest distance: {high - low:.3f}", at, low, high, _GREY))
    return misclassified("perturbation size ε", widest, lines) | {"title": title}


def misclassified(label: str, widest: float, lines: list[dict[str, Any]]) -> Chart:
    """A chart of the fraction of points that are misclassified within ε."""
    return {
        "x": {"label": label, "min": 0, "max": widest},
        "y": {"label": "misclassified within ε", "percent": True, "min": 0, "max": 1.02},
        "series": lines,
    }
