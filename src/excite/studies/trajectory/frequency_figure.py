"""The picture of `frequency`: the panels of figures 2 (top), 7a, 3a and 3b."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from excite.studies.figures import DASHES
from excite.studies.numbers import Numbers
from excite.studies.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00")  # cold to warm, and told apart by the colour-blind
_CURVES = (
    ("loss", "training loss", "log"),
    ("length", "normalized trajectory: length of each epoch", "linear"),
    ("test", "test loss", "log"),
    ("total", "normalized trajectory: length so far", "linear"),
)
_DOTS = (("variance", "variance of the bias, last ten epochs"), ("distance", "distance of the bias from its start"))


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[Numbers]
) -> dict[str, tuple[str, Figure]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.2), layout="constrained")
    axes = list(figure.subplots(2, 3).flat)
    for axis, (name, words, how) in zip(axes, _CURVES):
        curves(axis, details, name)
        axis.set(title=words, xlabel="epoch", yscale=how)
        if how == "linear":
            axis.set_ylim(bottom=0)
    for axis, (name, words) in zip(axes[len(_CURVES) :], _DOTS):
        dots(axis, list(details), numbers, name)
        axis.set(title=words, xlabel="frequency ω", yscale="log")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend(loc="lower left", fontsize=9, framealpha=0.9)
    count = max(len(found) for found in details.values())
    bands = f"lines: means over {count} repeats, bands: lowest to highest" if count > 1 else "one repeat"
    figure.suptitle(f"{study.title}\n{bands}", fontsize=12)
    return {"figure": (f"{study.title}: loss, trajectory, test loss, variance and distance by frequency", figure)}


def curves(
    axis: Axes, details: Mapping[str, list[Any]], name: str, along: str = "epochs", colours: Sequence[str] = COLOURS
) -> None:
    """A line an arm, the mean over repeats, and a band from the lowest to the highest."""
    for number, (arm, repeats) in enumerate(details.items()):
        at = np.array(repeats[0][along])
        each = np.array([found[name] for found in repeats])  # (repeats, places)
        colour, dashes = colours[number % len(colours)], DASHES[number % len(DASHES)]
        axis.plot(at, each.mean(0), color=colour, linestyle=dashes, linewidth=2, label=arm)
        axis.fill_between(at, each.min(0), each.max(0), color=colour, alpha=0.15, linewidth=0)
    axis.set_xlim(0, at[-1])


def dots(axis: Axes, arms: Sequence[str], numbers: Sequence[Numbers], name: str) -> None:
    """A dot a network, and the geometric mean of each arm."""
    for number, arm in enumerate(arms):
        values = np.array([found.values[name] for found in numbers if found.arm == arm])
        colour = COLOURS[number % len(COLOURS)]
        axis.plot([number] * len(values), values, "o", color=colour, alpha=0.6, markeredgewidth=0)
        middle = float(np.exp(np.log(values).mean()))
        axis.plot([number], [middle], "_", color="black", markersize=26, markeredgewidth=2)
    axis.set_xticks(range(len(arms)), [arm.removeprefix("ω = ") for arm in arms])
    axis.set_xlim(-0.5, len(arms) - 0.5)
