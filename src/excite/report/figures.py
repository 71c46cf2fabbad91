"""The figures of a report, as Plotly figures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from excite.report.collect import Arm
from excite.report.curves import curve, smooth, thin, widest_gap

# Colours that people with colour-blindness tell apart (Okabe and Ito).
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
_GREY = "#555"


def margin_curves(arms: Sequence[Arm]) -> go.Figure | None:
    """For each arm, the fraction of points misclassified within ε, for training and test data, and their gap."""
    shown = [arm for arm in arms if arm.values("train") is not None or arm.values("test") is not None]
    if not shown:
        return None
    figure = make_subplots(
        1, len(shown), shared_yaxes=True, subplot_titles=[arm.name for arm in shown], horizontal_spacing=0.03
    )
    every = np.concatenate([v for arm in shown for part in ("train", "test") if (v := arm.values(part)) is not None])
    finite = every[np.isfinite(every)]
    widest = float(finite.max()) * 1.05 if finite.size and finite.max() > 0 else 1.0
    for column, arm in enumerate(shown, 1):
        curves = {part: values for part in ("train", "test") if (values := arm.values(part)) is not None}
        for part, values in curves.items():
            x, y = curve(values, widest)
            line = {"color": COLOURS[0] if part == "train" else COLOURS[1], "width": 2.5, "shape": "hv"}
            figure.add_scatter(
                x=x, y=y, mode="lines", line=line, name=f"{part}ing data" if part == "train" else "test data",
                legendgroup=part, showlegend=column == 1, row=1, col=column,
                hovertemplate="within %{x:.3f}: %{y:.1%}<extra>" + part + "</extra>",
            )  # fmt: skip
        if len(curves) == 2:
            at, low, high = widest_gap(curves["train"], curves["test"])
            figure.add_scatter(
                x=[at, at], y=[low, high], mode="lines", line={"color": _GREY, "width": 2, "dash": "dot"}, row=1, col=column,
                name="largest distance", legendgroup="gap", showlegend=column == 1,
                hovertemplate=f"largest distance {high - low:.3f}<extra></extra>",
            )  # fmt: skip
            figure.add_annotation(
                x=at,
                y=(low + high) / 2,
                text=f"{high - low:.3f}",
                xshift=30,
                bgcolor="rgba(255,255,255,0.8)",
                showarrow=False,
                row=1,
                col=column,
            )
        figure.update_xaxes(title_text="perturbation size ε", range=[0, widest], row=1, col=column)
    figure.update_yaxes(title_text="fraction misclassified within ε", tickformat=".0%", range=[0, 1.02], row=1, col=1)
    return _styled(figure, 430)


def losses(arms: Sequence[Arm]) -> go.Figure | None:
    """The loss of every step, smoothed over 2 % of the steps, one line a run."""
    figure = go.Figure()
    for i, arm in enumerate(arms):
        for j, run in enumerate(arm.runs):
            if "loss/step" in run.metrics:
                steps, values = run.metrics["loss/step"]
                figure.add_scatter(
                    x=thin(steps), y=thin(smooth(values)), mode="lines", name=arm.name, legendgroup=arm.name, showlegend=j == 0,
                    line={"color": COLOURS[i % len(COLOURS)], "width": 1.5}, opacity=1.0 if len(arm.runs) == 1 else 0.7,
                )  # fmt: skip
    if not figure.data:
        return None
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="loss (each arm's own)", type="log", dtick=1)
    return _styled(figure, 360)


def ranks(arms: Sequence[Arm]) -> go.Figure | None:
    """Effective rank of each layer's input while training, as a share of the layer's width; the first run of each arm."""
    shown = [(arm, found) for arm in arms if (found := arm.runs[0].by_layer("rank/share"))]
    if not shown:
        return None
    titles = [arm.name for arm, _ in shown]
    figure = make_subplots(1, len(shown), shared_yaxes=True, subplot_titles=titles, horizontal_spacing=0.03)
    for column, (arm, layers) in enumerate(shown, 1):
        absolute = arm.runs[0].by_layer("rank/effective")
        for i, (layer, (steps, share)) in enumerate(layers.items()):
            numbers = absolute[layer][1] if layer in absolute else share
            figure.add_scatter(
                x=steps, y=share, mode="lines", name=f"input of {layer}", legendgroup=layer, showlegend=column == 1,
                line={"color": COLOURS[i % len(COLOURS)], "width": 2}, row=1, col=column, customdata=numbers,
                hovertemplate="step %{x}: rank %{customdata:.1f}, %{y:.0%} of the width<extra>" + layer + "</extra>",
            )  # fmt: skip
        figure.update_xaxes(title_text="step", row=1, col=column)
    figure.update_yaxes(title_text="effective rank / width", tickformat=".0%", rangemode="tozero", row=1, col=1)
    return _styled(figure, 380)


def distances(arms: Sequence[Arm]) -> go.Figure | None:
    """How far the weights have moved from their start, relative to their size then."""
    figure = go.Figure()
    for i, arm in enumerate(arms):
        for j, run in enumerate(arm.runs):
            if "distance/relative" in run.metrics:
                steps, values = run.metrics["distance/relative"]
                figure.add_scatter(
                    x=thin(steps), y=thin(values), mode="lines", name=arm.name, legendgroup=arm.name, showlegend=j == 0,
                    line={"color": COLOURS[i % len(COLOURS)], "width": 1.5}, opacity=1.0 if len(arm.runs) == 1 else 0.7,
                )  # fmt: skip
    if not figure.data:
        return None
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="‖θ − θ₀‖ / ‖θ₀‖", rangemode="tozero")
    return _styled(figure, 360)


def _styled(figure: go.Figure, height: int) -> go.Figure:
    figure.update_layout(
        template="plotly_white", height=height, margin={"l": 64, "r": 16, "t": 56, "b": 56},
        font={"family": "system-ui, sans-serif", "size": 14, "color": "#222"}, hovermode="closest",
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.1, "x": 0},
    )  # fmt: skip
    figure.update_annotations(font_size=14)
    return figure
