"""The figures of an audit's page, as Plotly figures."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go

from excite.margin import Margins
from excite.probes import Richness
from excite.report.audit.lipschitz import LipschitzConstants
from excite.report.audit.narrative import PART, number
from excite.report.curves import curve, thin
from excite.report.figures import COLOURS, as_text

_DASHES = ("solid", "dash", "dot", "dashdot")


def explained_variance(layers: Richness) -> go.Figure:
    """Fraction of the variance in the first k directions of each layer's input, k on a logarithmic axis."""
    figure = go.Figure()
    for i, layer in enumerate(layers):
        c = layer.covariance
        if c.total <= 0:
            continue
        fraction = np.minimum(1.0, np.cumsum(c.values) / c.total)
        figure.add_scatter(
            x=thin(np.arange(1, len(fraction) + 1)), y=thin(fraction), mode="lines+markers" if layer.width <= 20 else "lines",
            name=f"layer {as_text(layer.layer)} (width {layer.width})",
            line={"color": COLOURS[i % len(COLOURS)], "width": 2.2, "dash": _DASHES[i // len(COLOURS) % len(_DASHES)]},
            hovertemplate="the first %{x} directions hold %{y:.1%}<extra>layer " + as_text(layer.layer) + "</extra>",
        )  # fmt: skip
    figure.update_xaxes(title_text="number of directions, strongest first", type="log", dtick="D2")
    figure.update_yaxes(title_text="fraction of the variance", tickformat=".0%", range=[0, 1.02])
    return _styled(figure, 380)


def lipschitz_constants(constants: LipschitzConstants, bounds: Mapping[str, float]) -> go.Figure:
    """Distribution of local Lipschitz constants at training and test points; upper bounds as vertical lines."""
    figure = go.Figure()
    lines = {name: value for name, value in bounds.items() if np.isfinite(value) and value > 0}
    if constants.guaranteed is not None and np.isfinite(constants.guaranteed) and constants.guaranteed > 0:
        lines["guaranteed for all inputs"] = constants.guaranteed
    smallest = min(float(v[v > 0].min(initial=np.inf)) for v in constants.local.values())
    for i, (part, values) in enumerate(constants.local.items()):
        ordered = np.sort(values)
        figure.add_scatter(
            x=thin(ordered), y=thin(np.arange(1, len(ordered) + 1) / len(ordered)), mode="lines",
            name=f"{PART[part]} points", line={"color": COLOURS[i], "width": 2.5, "shape": "hv"},
            hovertemplate="at most %{x:.3g}: %{y:.0%} of the points<extra>" + PART[part] + "</extra>",
        )  # fmt: skip
    for i, (name, value) in enumerate(lines.items()):
        figure.add_scatter(
            x=[value, value], y=[0, 1], mode="lines", name=f"{name}: {number(value)}",
            line={"color": COLOURS[(i + 2) % len(COLOURS)], "width": 2, "dash": "dash"},
            hovertemplate=f"{number(value)}<extra></extra>",
        )  # fmt: skip
    ends = [smallest, *lines.values(), constants.largest]
    wide = np.isfinite(smallest) and max(ends) > 20 * smallest
    title = "local Lipschitz constant, 2-norm"
    figure.update_xaxes(title_text=title, **({"type": "log"} if wide else {"rangemode": "tozero"}))
    figure.update_yaxes(title_text="fraction of points below", tickformat=".0%", range=[0, 1.02])
    figure = _styled(figure, 400)
    figure.update_layout(legend={"orientation": "h", "yanchor": "bottom", "y": 1.04, "x": 0}, margin={"t": 90})
    return figure


def margin_curves(margins: Mapping[str, Margins], norm: str) -> go.Figure:
    """Fraction of points misclassified within ε; dashed, the certified upper bound on it."""
    figure = go.Figure()
    every = np.concatenate([np.asarray(m.values) for m in margins.values()])
    finite = every[np.isfinite(every)]
    widest = float(finite.max()) * 1.05 if finite.size and finite.max() > 0 else 1.0
    for i, (part, measured) in enumerate(margins.items()):
        x, y = curve(np.asarray(measured.values), widest)
        figure.add_scatter(
            x=thin(x), y=thin(y), mode="lines", name=f"{PART[part]} data",
            line={"color": COLOURS[i], "width": 2.5, "shape": "hv"},
            hovertemplate="within %{x:.3g}: %{y:.1%}<extra>" + PART[part] + "</extra>",
        )  # fmt: skip
        if measured.certified is not None:
            safe = np.asarray(measured.certified)
            x, y = curve(np.where(safe <= widest, safe, np.inf), widest)
            figure.add_scatter(
                x=thin(x), y=thin(y), mode="lines", name=f"{PART[part]} data, certified upper bound",
                line={"color": COLOURS[i], "width": 1.2, "shape": "hv", "dash": "dash"}, hoverinfo="skip",
            )  # fmt: skip
    figure.update_xaxes(title_text=f"perturbation size ε ({norm}-norm)", range=[0, widest])
    figure.update_yaxes(title_text="fraction misclassified within ε", tickformat=".0%", range=[0, 1.02])
    return _styled(figure, 380)


def _styled(figure: go.Figure, height: int) -> go.Figure:
    figure.update_layout(
        template="plotly_white", height=height, margin={"l": 64, "r": 16, "t": 24, "b": 56}, hovermode="closest",
        font={"family": "system-ui, sans-serif", "size": 14, "color": "#222"},
        legend={"orientation": "v", "x": 1.02, "y": 1},
    )  # fmt: skip
    return figure
