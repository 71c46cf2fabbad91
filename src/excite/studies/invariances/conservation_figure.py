"""The picture of `conservation`: what is left of the law's entries over training, a panel a case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from excite.studies.figures import COLOURS
from excite.studies.numbers import Numbers
from excite.studies.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FLOOR = 1e-18
_LINES = {
    ("linear", 1): (COLOURS[2], "-", "linear, diagonal"),
    ("linear", 2): (COLOURS[6], "--", "linear, off the diagonal"),
    ("ReLU", 1): (COLOURS[3], "-", "ReLU, diagonal"),
    ("ReLU", 2): (COLOURS[1], "--", "ReLU, off the diagonal"),
}


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[Numbers]
) -> dict[str, tuple[str, Figure]]:
    from matplotlib.figure import Figure

    cases: dict[str, dict[str, Any]] = {}
    for arm, seeds in details.items():
        case, _, kind = arm.rpartition(", ")
        cases.setdefault(case, {})[kind] = seeds[0]["curve"]
    columns = min(4, len(cases))
    rows = -(-len(cases) // columns)
    figure = Figure(figsize=(1 + 2.8 * columns, 1 + 2.7 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axis in axes.flat[len(cases) :]:
        axis.axis("off")
    for axis, (case, kinds) in zip(axes.flat, cases.items()):
        for (kind, column), (colour, dashes, label) in _LINES.items():
            if kind in kinds:
                steps = [row[0] for row in kinds[kind]]
                left = [max(row[column], _FLOOR) for row in kinds[kind]]
                axis.plot(steps, left, color=colour, linestyle=dashes, linewidth=1.8, label=label)
        axis.set(xscale="log", yscale="log", ylim=(_FLOOR, 10))
        axis.set_title(case, fontsize=9)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("relative change\nthat η² does not explain")
    for axis in axes.flat[max(len(cases) - columns, 0) : len(cases)]:  # the lowest of every column
        axis.set_xlabel("step of gradient descent")
        axis.tick_params(labelbottom=True)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.suptitle(study.title, fontsize=13)
    return {"figure": (f"{study.title}: entries of W₁W₁' − W₂'W₂ over training", figure)}
