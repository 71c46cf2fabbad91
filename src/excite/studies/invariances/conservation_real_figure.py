"""Pictures of `conservation-real`, a panel an arm: drift and its parts over training, and the balance of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from excite.studies.figures import COLOURS
from excite.studies.numbers import Numbers
from excite.studies.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LINES = {
    "drift": ("#000000", "-", "drift"),
    "step": (COLOURS[2], "--", "by the step size"),
    "momentum": (COLOURS[1], "--", "by momentum"),
    "decay": (COLOURS[3], "--", "by decay"),
    "rescaling": (COLOURS[4], "--", "by rescaling"),
    "eps": (COLOURS[5], ":", "by eps of normalizations"),
    "rest": ("#888888", "-", "rest"),
}
_FLOOR = 1e-10


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[Numbers]
) -> dict[str, tuple[str, Figure]]:
    return {
        "figure": (f"{study.title}: drift and its parts", _parts(study, details)),
        "balance": ("Balance of layers: what makes channels over what reads them", _balance(details)),
    }


def _panels(count: int) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    columns = min(3, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(1 + 3.3 * columns, 1 + 2.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    return figure, axes


def _balance(details: Mapping[str, list[Any]]) -> Figure:
    from matplotlib import colormaps

    figure, axes = _panels(len(details))
    for axis, (arm, seeds) in zip(axes.flat, details.items()):
        curve = seeds[0]["balance"]
        laws = list(curve[0][1])
        steps = [max(step, 0.5) for step, _ in curve]  # the start, on a logarithmic axis
        for number, law in enumerate(laws):
            colour = colormaps["viridis"](0.9 * number / max(len(laws) - 1, 1))
            axis.plot(steps, [found[law] for _, found in curve], color=colour, linewidth=1.2)
        axis.axhline(1, color="#000000", linewidth=0.8, linestyle=":")
        axis.set(xscale="log", yscale="log")
        axis.set_title(arm, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("‖what makes channels‖²\nover ‖what reads them‖²")
    figure.suptitle("Balance of layers: a line a law, from the first layer (dark) to the last (bright)", fontsize=13)
    return figure


def _parts(study: Study, details: Mapping[str, list[Any]]) -> Figure:
    figure, axes = _panels(len(details))
    for axis, (arm, seeds) in zip(axes.flat, details.items()):
        curve = seeds[0]["curve"]
        for part, (colour, dashes, label) in _LINES.items():
            found = [(step, sizes[part]) for step, sizes in curve]
            # A part that does not occur keeps its place in the legend.
            shown = [(step, value) for step, value in found if value > _FLOOR]
            axis.plot(*(zip(*shown) if shown else ([], [])), color=colour, linestyle=dashes, linewidth=1.8, label=label)
        axis.set(xscale="log", yscale="log", ylim=(_FLOOR, 3))
        axis.set_title(arm, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("change of the conserved numbers\n(relative to squared weights)")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, fontsize=9, frameon=False)
    figure.suptitle(study.title, fontsize=13)
    return figure
