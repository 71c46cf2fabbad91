"""The picture of `low-rank`: ‖W‖₂²/‖W‖²_F of every layer over training, and the least alignment, a panel an arm."""

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

    columns = min(4, len(details))
    rows = -(-len(details) // columns)
    figure = Figure(figsize=(1 + 2.8 * columns, 1.2 + 2.5 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axis in axes.flat[len(details) :]:
        axis.axis("off")
    handles: dict[str, Any] = {}
    for axis, (arm, seeds) in zip(axes.flat, details.items()):
        curve = seeds[0]["curve"]
        steps = [point[0] for point in curve]
        for layer in range(len(curve[0][1])):
            label = f"layer {layer + 1}"
            line = axis.plot(
                steps, [p[1][layer] for p in curve], color=COLOURS[2 + layer % 5], linewidth=1.8, label=label
            )
            handles.setdefault(label, line[0])
        aligned = axis.plot(steps, [min(p[2]) for p in curve], color=COLOURS[0], linestyle=":", linewidth=1.6)
        handles.setdefault("least alignment", aligned[0])
        axis.set(ylim=(0, 1.03), xlim=(1, steps[-1]))
        axis.set_xscale("symlog", linthresh=1)
        axis.axhline(1, color="#bbb", linewidth=0.8, zorder=0)
        axis.set_title(f"{arm}\n(norm grew ×{curve[-1][3]:.3g})", fontsize=9)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel(r"$\|W\|_2^2\,/\,\|W\|_F^2$" + "\n(rank one: 1)")
    for axis in axes.flat[max(len(details) - columns, 0) : len(details)]:  # the lowest of every column
        axis.set_xlabel("step")
        axis.tick_params(labelbottom=True)
    ordered = sorted(handles.items())
    figure.legend(
        [h for _, h in ordered], [n for n, _ in ordered], loc="outside lower center", ncols=6, fontsize=9, frameon=False
    )
    figure.suptitle(study.title, fontsize=13)
    return {"figure": (f"{study.title} The largest squared singular value over the sum of all, by layer", figure)}
