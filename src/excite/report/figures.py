"""The figure of margins, as a Plotly figure. Curves over steps are drawn in the browser (`static/view.js`)."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from excite.report.collect import VariantRuns
from excite.report.curves import curve, widest_gap

# Colours that people with colour-blindness tell apart (Okabe and Ito).
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
_GREY = "#555"


def as_text(text: str) -> str:
    """Escapes text that Plotly would read as markup (tags, entities, %{...}); the same as `safe` in `static/view.js`."""
    return html.escape(text, quote=False).replace("%{", "%\u200b{")


def margin_curves(variants: Sequence[VariantRuns]) -> go.Figure | None:
    """One plot per variant: fraction of points misclassified within ε on training and test data, and their largest distance."""
    shown = [
        variant for variant in variants if variant.values("train") is not None or variant.values("test") is not None
    ]
    if not shown:
        return None
    figure = make_subplots(
        1,
        len(shown),
        shared_yaxes=True,
        subplot_titles=[as_text(variant.name) for variant in shown],
        horizontal_spacing=0.03,
    )
    every = np.concatenate(
        [v for variant in shown for part in ("train", "test") if (v := variant.values(part)) is not None]
    )
    finite = every[np.isfinite(every)]
    widest = float(finite.max()) * 1.05 if finite.size and finite.max() > 0 else 1.0
    for column, variant in enumerate(shown, 1):
        curves = {part: values for part in ("train", "test") if (values := variant.values(part)) is not None}
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


def _styled(figure: go.Figure, height: int) -> go.Figure:
    figure.update_layout(
        template="plotly_white", height=height, margin={"l": 64, "r": 16, "t": 56, "b": 56},
        font={"family": "system-ui, sans-serif", "size": 14, "color": "#222"}, hovermode="closest",
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.1, "x": 0},
    )  # fmt: skip
    figure.update_annotations(font_size=14)
    return figure
