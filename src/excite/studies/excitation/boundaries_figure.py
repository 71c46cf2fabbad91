"""The pictures of `boundaries`: clusters in the plane and where each network changes its mind, a panel a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from excite.studies.figures import COLOURS
from excite.studies.numbers import Numbers
from excite.studies.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Details = Mapping[str, list[Any]]
_CLASSES = (COLOURS[2], COLOURS[1])  # blue between, orange outside: the paper's
_LINES: dict[str, tuple[str, Any]] = {"cross-entropy": ("#000000", "-"), "squared error": ("#009E73", (0, (4, 1.5)))}


def draw(study: Study, scale: Any, details: Details, numbers: Sequence[Numbers]) -> dict[str, tuple[str, Figure]]:
    centred = {loss: details[f"{loss}, centred data"] for loss in _LINES if f"{loss}, centred data" in details}
    found = {
        "figure": (f"{study.title}: a panel a seed", panels({loss: details[loss] for loss in _LINES}, study.title))
    }
    if len(centred) == len(_LINES):
        found["centred"] = ("The same with the mean of the data removed", panels(centred, "Centred data"))
    return found


def panels(details: Details, title: str) -> Figure:
    """A panel a seed; the boundary of each loss, its nearest training point and the circle of radius margin around it."""
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Circle

    count = len(next(iter(details.values())))
    columns = min(3, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(1 + 3.1 * columns, 1.3 + 3.2 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[count:]:
        axis.axis("off")
    for k, axis in enumerate(axes[:count]):
        any_loss = next(iter(details.values()))[k]
        points, labels = np.array(any_loss["points"]), np.array(any_loss["labels"])
        for loss, (colour, dashes) in _LINES.items():
            found = details[loss][k]
            axis.add_collection(LineCollection(found["boundary"], colors=colour, linestyles=[dashes], linewidths=1.8))
            centre = points[found["nearest"]]
            axis.add_patch(Circle(centre, found["margin"], fill=False, color=colour, linestyle=dashes, linewidth=0.8))
        for label, colour in enumerate(_CLASSES):
            axis.scatter(*points[labels == label].T, s=14, color=colour, zorder=3)
        middle, half = (points.min(0) + points.max(0)) / 2, 0.75 * float(np.ptp(points, axis=0).max())
        axis.set(xlim=(middle[0] - half, middle[0] + half), ylim=(middle[1] - half, middle[1] + half), aspect="equal")
        axis.tick_params(labelsize=8)
        solid, dashed = (details[loss][k]["margin"] for loss in _LINES)
        axis.set_title(f"seed {any_loss['seed']}: margin {solid:.2f} solid, {dashed:.2f} dashed", fontsize=9)
    figure.suptitle(title, fontsize=13)
    figure.legend(handles=_handles(), loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    return figure


def _handles() -> list[Any]:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=c, linestyle=d, linewidth=1.8, label=loss) for loss, (c, d) in _LINES.items()]
    names = ("one class", "the other")
    dots = [Line2D([], [], color=c, marker="o", linestyle="", label=n) for c, n in zip(_CLASSES, names)]
    return [*lines, *dots]
