"""The picture of `corruption`: the panels of figures 2 (bottom), 7b, 3c and 4, and both normalizations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from excite.studies.frequency_figure import curves, dots
from excite.studies.numbers import Numbers
from excite.studies.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CURVES = (
    ("loss", "training loss", "linear"),
    ("length", "length of the normalized trajectory, an epoch", "log"),
    ("test", "test loss", "linear"),
    ("theirs", "with the reciprocal, as the authors' program", "log"),
    ("total", "length of the normalized trajectory so far", "linear"),
    ("distance", "distance of the bias from its start", "linear"),
)
_DOTS = (("variance", "variance of the bias, last ten epochs"), ("test", "test loss, last ten epochs"))


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[Numbers]
) -> dict[str, tuple[str, Figure]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 7.2), layout="constrained")
    axes = list(figure.subplots(2, 4).flat)
    order = [0, 1, 2, 4, 5, 6]
    for axis, (name, words, how) in zip([axes[i] for i in order], _CURVES):
        curves(axis, details, name)
        axis.set(title=words, xlabel="epoch", yscale=how)
        if how == "linear":
            axis.set_ylim(bottom=0)
    for axis, (name, words) in zip((axes[3], axes[7]), _DOTS):
        dots(axis, list(details), numbers, name)
        axis.set_xticks(range(len(details)), [arm.removesuffix(" corrupted") for arm in details])
        axis.set(title=words, xlabel="corrupted labels", yscale="log")
    for axis in axes:
        axis.grid(alpha=0.3)
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
