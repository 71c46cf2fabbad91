"""The picture of `reduced-alignment`: measured ratios and what is promised of them, a panel an arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from excite.studies.figures import COLOURS
from excite.studies.numbers import Numbers
from excite.studies.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[Numbers]
) -> dict[str, tuple[str, Figure]]:
    from matplotlib.figure import Figure

    columns = -(-len(details) // 2)
    figure = Figure(figsize=(1 + 3.6 * columns, 7), layout="constrained")
    axes = figure.subplots(2, columns, squeeze=False, sharex=True, sharey=True)
    panels = axes.T.flat  # linear above ReLU
    for axis, (arm, seeds) in zip(panels, details.items()):
        names, curve = seeds[0]["layers"], seeds[0]["curve"]
        steps = [point[0] for point in curve]
        for k, _ in enumerate(names):
            colour = COLOURS[2 + k % 5]
            axis.plot(steps, [rows[k][0] for _, rows in curve], color=colour, linewidth=1.8, label=f"layer {k + 1}")
            axis.plot(steps, [rows[k][1] for _, rows in curve], color=colour, linestyle="--", linewidth=1.2)
        axis.plot(
            [], [], color=COLOURS[0], linestyle="--", linewidth=1.2, label="dashed: the least that Theorem 2 allows it"
        )
        axis.set(ylim=(0, 1.03), xlim=(1, steps[-1]), title=arm)
        axis.set_xscale("symlog", linthresh=1)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel(r"$\|W\|_2^2\,/\,\|W\|_F^2$  (rank one: 1)")
    for axis in axes[-1]:
        axis.set_xlabel("step")
    most = max(axes.flat, key=lambda axis: len(axis.get_legend_handles_labels()[1]))
    handles, labels = most.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, fontsize=9, frameon=False)
    figure.suptitle(study.title, fontsize=13)
    return {"figure": (f"{study.title}: measured, and promised by equation 13", figure)}
