"""The charts of an audit's page, as data; see `excite.report.figures`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from excite.margin import Margins
from excite.probes import Richness
from excite.report.audit.lipschitz import LipschitzConstants
from excite.report.audit.narrative import SPLIT_NAMES, number
from excite.report.curves import curve
from excite.report.figures import Chart, largest, misclassified, series, vertical

_MAX_COLOURS = 7


def explained_variance(layers: Richness) -> Chart:
    """Fraction of the variance in the first k directions of each layer's input, k on a logarithmic axis."""
    shown = [layer for layer in layers if layer.covariance.total > 0]
    lines = []
    for i, layer in enumerate(shown):
        fraction = np.minimum(1.0, np.cumsum(layer.covariance.values) / layer.covariance.total)
        name = f"{layer.layer} (width {layer.width})"
        line = series(name, np.arange(1, len(fraction) + 1), fraction, i, width=2)
        lines.append(line | ({"colour": {"depth": i / (len(shown) - 1)}} if len(shown) > _MAX_COLOURS else {}))
    return {
        "x": {"label": "number of directions, strongest first", "log": True},
        "y": {"label": "fraction of the variance", "percent": True, "min": 0, "max": 1.02},
        "series": lines,
    }


def lipschitz_constants(constants: LipschitzConstants, bounds: Mapping[str, float]) -> Chart:
    """Distribution of local Lipschitz constants at training and test points; upper bounds as vertical lines."""
    lines = {name: value for name, value in bounds.items() if np.isfinite(value) and value > 0}
    if constants.guaranteed is not None and np.isfinite(constants.guaranteed) and constants.guaranteed > 0:
        lines["guaranteed for all inputs"] = constants.guaranteed
    smallest = min(float(v[v > 0].min(initial=np.inf)) for v in constants.local.values())
    drawn = []
    for i, (split, values) in enumerate(constants.local.items()):
        ordered = np.sort(values)
        drawn.append(
            series(f"{SPLIT_NAMES[split]} points", ordered, np.arange(1, len(ordered) + 1) / len(ordered), i, step=True)
        )
    drawn += [
        vertical(f"{name}: {number(value)}", value, 0, 1, i + 2, 1) for i, (name, value) in enumerate(lines.items())
    ]
    ends = [smallest, *lines.values(), constants.largest]
    wide = bool(np.isfinite(smallest) and max(ends) > 20 * smallest)
    return {
        "x": {"label": "local Lipschitz constant, 2-norm", **({"log": True} if wide else {"zero": True})},
        "y": {"label": "fraction of points below", "percent": True, "min": 0, "max": 1.02},
        "series": drawn,
    }


def margin_curves(margins: Mapping[str, Margins], norm: str) -> Chart:
    """Fraction of points misclassified within ε; dashed, the certified upper bound on it."""
    widest = largest([np.asarray(m.values) for m in margins.values()])
    lines = []
    for i, (split, measured) in enumerate(margins.items()):
        lines.append(series(f"{SPLIT_NAMES[split]} points", *curve(np.asarray(measured.values), widest), i, step=True))
        if measured.certified is not None:
            safe = np.asarray(measured.certified)
            x, y = curve(np.where(safe <= widest, safe, np.inf), widest)
            lines.append(
                series(f"{SPLIT_NAMES[split]} points, certified upper bound", x, y, i, step=True, dash=1, width=1.2)
            )
    return misclassified(f"perturbation size ε ({norm}-norm)", widest, lines)
