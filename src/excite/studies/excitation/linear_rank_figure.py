"""The picture of `linear-rank`: σ₂/σ₁ of every layer over training, a panel an arm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from excite.studies.figures import COLOURS
from excite.studies.numbers import Numbers
from excite.studies.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOWEST = 1e-5


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[Numbers]
) -> dict[str, tuple[str, Figure]]:
    from matplotlib.figure import Figure

    columns = min(4, len(details))
    rows = -(-len(details) // columns)
    figure = Figure(figsize=(1 + 2.9 * columns, 1 + 3 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axis in axes.flat[len(details) :]:
        axis.axis("off")
    for axis, (arm, seeds) in zip(axes.flat, details.items()):
        curve = seeds[0]["curve"]
        steps = [step for step, _, _ in curve]
        for layer in range(len(curve[0][1])):
            ratios = [found[layer] or math.nan for _, found, _ in curve]
            axis.plot(steps, ratios, color=COLOURS[2 + layer % 5], linewidth=1.8, label=f"layer {layer + 1}")
        bounds = [bound or math.nan for _, _, bound in curve]
        axis.plot(steps, bounds, color=COLOURS[0], linestyle="--", linewidth=1.4, label="bound on all")
        axis.set(yscale="log", ylim=(_LOWEST, 30), xlim=(1, steps[-1]))
        axis.set_xscale("symlog", linthresh=1)
        axis.set_title(arm, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("σ₂/σ₁ (one direction: 0)")
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.legend(
        *axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=9, frameon=False
    )
    figure.suptitle(study.title, fontsize=13)
    return {"figure": (f"{study.title}: second over first singular value", figure)}
