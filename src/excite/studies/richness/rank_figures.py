"""Figures of studies on the rank of hidden signals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from excite.studies.figures import COLOURS, DASHES
from excite.studies.study import VariantResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = {
    "outputs, convolutions before pooling\n(as in the paper)": ("conv1", "conv2", "linear1", "linear2"),
    "inputs of the next layer,\nconvolutions after pooling": ("pooled1", "pooled2", "linear1", "linear2"),
}
TICKS = [mantissa * 10**power for power in range(4) for mantissa in (1, 2, 5)]


def variance_figure(seeds: Sequence[Mapping[str, Any]], layers: Mapping[str, str], title: str) -> Figure:
    """The share of the variance of training images in the first components, a line a layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (words, names) in zip(axes, PANELS.items()):
        for number, name in enumerate(names):
            shares = [100 * np.array(seed["train"][name]["explained"]) for seed in seeds]
            share = np.stack(shares)
            at = np.arange(1, share.shape[1] + 1)
            colour, dashes = COLOURS[number], DASHES[number]
            label = f"{layers[name]} ({seeds[0]['train'][name]['width']:,} units)"
            axis.plot(at, share.mean(0), color=colour, linestyle=dashes, linewidth=2, label=label)
            axis.fill_between(at, share.min(0), share.max(0), color=colour, alpha=0.15, linewidth=0)
        axis.set(title=words, xlabel="principal components", xlim=(1, None), ylim=(0, 102))
        axis.grid(alpha=0.3)
        axis.legend(loc="lower right", fontsize=9)
    axes[0].set_ylabel("% of the variance explained")
    figure.suptitle(title, fontsize=12)
    return figure


def variants_figure(numbers: Sequence[VariantResult], layers: Mapping[str, str], title: str) -> Figure:
    """For every variant and layer the effective rank on test images: one dot per seed, a bar at the mean; a line at the first variant."""
    from matplotlib.figure import Figure

    variants = list(dict.fromkeys(found.variant for found in numbers))
    figure = Figure(figsize=(13, 1.6 + 0.4 * len(variants)), layout="constrained")
    axes = figure.subplots(1, len(layers), sharey=True)
    for axis, (name, words) in zip(axes, layers.items()):
        for row, variant in enumerate(["untrained", *variants]):
            of, kind = (variants[0], "untrained") if variant == "untrained" else (variant, "effective")
            values = [float(getattr(found, f"{kind}_{name}")) for found in numbers if found.variant == of]
            colour = COLOURS[3] if variant == "untrained" else COLOURS[2]
            axis.plot(values, [row] * len(values), "o", color=colour, alpha=0.5, markeredgewidth=0)
            axis.plot([float(np.mean(values))], [row], "|", color=COLOURS[0], markersize=16, markeredgewidth=2)
            if row == 1:
                axis.axvline(float(np.mean(values)), color=COLOURS[0], linewidth=0.8, linestyle=":")
        width = int(getattr(numbers[0], f"width_{name}"))
        axis.set(title=f"{words}\n({width:,} units)", xscale="log", xlabel="effective rank (logarithmic)")
        low, high = axis.get_xlim()
        ticks = [tick for tick in TICKS if low <= tick <= high]
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.set_xticks([], minor=True)
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(variants) + 1), ["untrained", *variants])
    axes[0].invert_yaxis()
    figure.suptitle(f"{title}: test images, one dot per seed, the bar is the mean, dotted: {variants[0]}", fontsize=11)
    return figure
