"""The picture of `architecture`: training loss, trajectory and test loss of two networks, for few and for many images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from excite.studies.figures import COLOURS
from excite.studies.numbers import Numbers
from excite.studies.study import Study
from excite.studies.trajectory.frequency_figure import curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS = (("loss", "training loss"), ("length", "trajectory: length of 100 steps"), ("test", "test loss"))


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[Numbers]
) -> dict[str, tuple[str, Figure]]:
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(arm.split(", ")[1] for arm in details))
    figure = Figure(figsize=(12, 1 + 3 * len(sizes)), layout="constrained")
    axes = figure.subplots(len(sizes), len(_PANELS), squeeze=False)
    for row, size in zip(axes, sizes):
        mine = {arm.split(", ")[0]: found for arm, found in details.items() if arm.endswith(size)}
        for axis, (name, words) in zip(row, _PANELS):
            curves(axis, mine, name, "steps", (COLOURS[2], COLOURS[1]))
            axis.set(title=f"{words}, {size}", xlabel="step")
            axis.locator_params(axis="x", nbins=4)
            axis.grid(alpha=0.3)
            if name == "length":
                axis.set_ylim(bottom=0)
            else:
                axis.set_yscale("log")
    axes[0][0].legend(fontsize=9, framealpha=0.9)
    count = max(len(found) for found in details.values())
    bands = f"lines: means over {count} repeats, bands: lowest to highest" if count > 1 else "one repeat"
    figure.suptitle(f"{study.title}\n{study.task}; {bands}", fontsize=12)
    return {"figure": (f"{study.title}: training loss, trajectory and test loss", figure)}
