"""The picture of `corruption`: the panels of figures 2 (bottom), 7b, 3c and 4, and both normalizations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from excite.studies.figures import plain_ticks
from excite.studies.numbers import Numbers
from excite.studies.study import Study
from excite.studies.trajectory.frequency_figure import curves, dots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CURVES = (
    ("loss", "training loss", "linear"),
    ("length", "normalized trajectory: length of each epoch", "log"),
    ("test", "test loss", "linear"),
    ("theirs", "divided by |1 − ŷ − y|, as the authors do", "log"),
    ("total", "normalized trajectory: length so far", "linear"),
    ("distance", "distance of the bias from its start", "linear"),
)
_DOTS = (("variance", "variance of the bias, last ten epochs"), ("test", "test loss, last ten epochs"))


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[Numbers]
) -> dict[str, tuple[str, Figure]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 6.8), layout="constrained")
    axes = list(figure.subplots(2, 4).flat)
    order = [0, 1, 2, 4, 5, 6]
    for axis, (name, words, how) in zip([axes[i] for i in order], _CURVES):
        curves(axis, details, name)
        axis.set_title(words, fontsize=11)
        axis.set(xlabel="epoch", yscale=how)
        if how == "linear":
            axis.set_ylim(bottom=0)
    for axis, (name, words) in zip((axes[3], axes[7]), _DOTS):
        dots(axis, list(details), numbers, name)
        axis.set_xticks(range(len(details)), [arm.removesuffix(" corrupted") for arm in details])
        axis.set_title(words, fontsize=11)
        axis.set(xlabel="corrupted labels", yscale="log")
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.get_yscale() == "log":
            plain_ticks(axis.yaxis, *axis.get_ylim())
    axes[0].legend(fontsize=9, framealpha=0.9)
    count = max(len(found) for found in details.values())
    bands = f"lines: means over {count} repeats, bands: lowest to highest" if count > 1 else "one repeat"
    figure.suptitle(f"{study.title}\n{bands}, scale {scale.name}", fontsize=12)
    return {
        "figure": (
            f"{study.title}: loss, trajectory, test loss, variance and distance by share of corrupted labels",
            figure,
        )
    }
