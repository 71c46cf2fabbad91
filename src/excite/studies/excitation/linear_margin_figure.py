"""The pictures of `linear-margin`: boundaries in the plane above, margins over training below, a column a data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from excite.studies.figures import COLOURS
from excite.studies.numbers import Numbers
from excite.studies.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK, ORANGE, BLUE, GREEN, PINK = COLOURS[:5]
_BOUNDS = (("bound", "Theorem 2, as it holds", ORANGE, "--"), ("printed", "Theorem 2, as printed", PINK, (0, (1, 1))))


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[Numbers]
) -> dict[str, tuple[str, Figure]]:
    plain = {arm: found for arm, found in details.items() if "scaled" not in arm}
    scaled = {arm: found for arm, found in details.items() if "scaled" in arm}
    figures = {"figure": (f"{study.title}: boundaries and margins", columns(plain, study.title))}
    if scaled:
        figures["scaled"] = (
            "The same after the data are centred and scaled",
            columns(scaled, "Centred and scaled data"),
        )
    return figures


def columns(details: Mapping[str, list[Any]], title: str) -> Figure:
    """Of the first seed, as the authors: bounds differ between seeds where these draw the data."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.2 + 3.6 * len(details), 7.6), layout="constrained")
    above, below = figure.subplots(2, len(details), squeeze=False)
    for (arm, seeds), plane, curve in zip(details.items(), above, below):
        _plane(plane, seeds[0])
        _curve(curve, seeds[0])
        plane.set_title(arm, fontsize=11)
    below[0].set_ylabel("distance of the nearest training point")
    handles, labels = below[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.suptitle(title, fontsize=13)
    return figure


def _plane(axis: Axes, found: Mapping[str, Any]) -> None:
    points, labels = np.array(found["points"]), np.array(found["labels"])
    for label, colour in ((1.0, BLUE), (0.0, ORANGE)):
        axis.scatter(points[labels == label, 0], points[labels == label, 1], s=14, color=colour, zorder=3)
    middle, half = (points.min(0) + points.max(0)) / 2, 0.7 * float(np.ptp(points, axis=0).max())
    for name, colour, dashes, words in (("trained", BLACK, "-", "trained"), ("optimal", GREEN, "--", "largest margin")):
        w, b = np.array(found[name][:2]), found[name][2]
        foot = middle - w * (w @ middle + b) / (w @ w)
        along = 4 * half * np.array([-w[1], w[0]]) / np.linalg.norm(w)
        axis.plot(*np.stack([foot - along, foot + along]).T, color=colour, linestyle=dashes, linewidth=1.8, label=words)
    axis.set(xlim=(middle[0] - half, middle[0] + half), ylim=(middle[1] - half, middle[1] + half), aspect="equal")
    axis.tick_params(labelsize=8)
    axis.legend(loc="best", fontsize=8)


def _curve(axis: Axes, first: Mapping[str, Any]) -> None:
    steps, margins = np.array(first["curve"]).T
    axis.plot(steps, np.maximum(margins, 1e-9), color=BLACK, linewidth=1.8, label="margin")
    axis.axhline(first["margins"]["limit"], color=BLACK, linestyle=":", linewidth=1.2, label="limit of training")
    axis.axhline(
        first["margins"]["optimal"], color=GREEN, linewidth=1.6, label="largest margin (support vector machine)"
    )
    for name, words, colour, dashes in _BOUNDS:
        axis.axhline(first[name], color=colour, linestyle=dashes, linewidth=1.8, label=words)
    top = max(first["margins"]["optimal"], first["bound"])
    axis.set(
        xscale="log", yscale="log", xlabel="step of training", ylim=(min(top / 20, first["printed"] / 3), 1.5 * top)
    )
    axis.grid(alpha=0.3, which="both")
