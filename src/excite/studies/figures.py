"""Figures of a study: margin curves in the papers' form, and the gap of every variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from excite._core.files import writing
from excite.margin import Margins
from excite.studies.study import VariantResult

if TYPE_CHECKING:
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Colours that people with colour-blindness tell apart (Okabe and Ito), and dashes for those who print in grey.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), ":")
PARTS = {"train": "training images", "test": "test images"}
Curves = Mapping[str, Sequence[Mapping[str, Margins]]]  # by variant, one entry per seed, by part


def margin_figure(curves: Curves, title: str, task: str) -> Figure:
    """The percentage misclassified within ε against ε: left training images, right test images, one curve per variant.

    Lines are means over seeds, bands show the range over seeds.
    """
    from matplotlib.figure import Figure

    at = np.linspace(0, _widest(curves), 400)
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (split, label) in zip(axes, PARTS.items()):
        for number, (variant, seeds) in enumerate(curves.items()):
            fraction = 100 * np.stack([margins[split].within(at) for margins in seeds])  # (seeds, places)
            colour, dashes = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
            axis.plot(at, fraction.mean(0), color=colour, linestyle=dashes, linewidth=2, label=variant)
            axis.fill_between(at, fraction.min(0), fraction.max(0), color=colour, alpha=0.15, linewidth=0)
        axis.set(title=label, xlabel="size ε of the perturbation (infinity norm)", xlim=(0, at[-1]), ylim=(0, 100))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("% misclassified within ε\n(lower is more robust)")
    axes[1].legend(loc="lower right", framealpha=0.9)
    counts = sorted({len(curve) for curve in curves.values()})
    over = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    bands = f"lines: means over {over} seeds, bands: lowest to highest seed" if counts[-1] > 1 else "one seed"
    figure.suptitle(f"{title}\n", fontsize=13)
    figure.text(
        0.5,
        0.925,
        f"{task}; {bands}; a perturbation of 1.0 turns white into grey",
        ha="center",
        fontsize=9,
        color="#444",
    )
    return figure


def gap_figure(numbers: Sequence[VariantResult], title: str) -> Figure:
    """For every variant the gap and the median test margin."""
    panels = {
        "gap": "gap between training and test curves\n(smaller: training tells more about test)",
        "margin_test": "median margin of test images\n(larger is more robust)",
    }
    return dot_figure(numbers, title, panels, from_zero=True)


def dot_figure(
    numbers: Sequence[VariantResult], title: str, panels: Mapping[str, str], *, from_zero: bool = False
) -> Figure:
    """A panel for each number, a row for each variant: one dot per seed, a bar at the mean.

    Args:
        numbers: Results of all variants and seeds.
        title: Title of the figure.
        panels: Label of the axis by name of the number.
        from_zero: Whether axes begin at zero.
    """
    from matplotlib.figure import Figure

    variants = list(dict.fromkeys(number.variant for number in numbers))
    figure = Figure(figsize=(max(6.0, 5.0 * len(panels)), 1.4 + 0.42 * len(variants)), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (name, label) in zip(axes, panels.items()):
        for row, variant in enumerate(variants):
            values = [float(getattr(number, name)) for number in numbers if number.variant == variant]
            axis.plot(values, [row] * len(values), "o", color=COLOURS[2], alpha=0.5, markeredgewidth=0)
            axis.plot([float(np.mean(values))], [row], "|", color=COLOURS[0], markersize=16, markeredgewidth=2)
        axis.set(xlabel=label)
        if from_zero:
            axis.set_xlim(0, None)
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(variants)), variants)
    axes[0].invert_yaxis()
    figure.suptitle(f"{title}: one dot per seed, the bar is the mean", fontsize=12)
    return figure


def radius_figure(numbers: Sequence[VariantResult], title: str) -> Figure:
    """Radius "auto" by epoch, and its cost beside what is allowed: a line for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number in (number for number in numbers if "factor" in number.curves):
        epochs = np.arange(1, len(number.curves["factor"]) + 1)
        left.semilogy(epochs, 100 * np.array(number.curves["factor"]), color=COLOURS[2], linewidth=1)
        for name, colour in (("cost", COLOURS[2]), ("allowed", COLOURS[1])):
            if name in number.curves:
                right.semilogy(epochs, 100 * np.array(number.curves[name]), color=colour, linewidth=1)
    left.set(xlabel="epoch", ylabel="radius, % of each layer's\nroot mean square")
    right.set(xlabel="epoch", ylabel="training error, %\n(orange: what is allowed)")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.suptitle(f"{title}: one line per seed", fontsize=12)
    return figure


def plain_ticks(axis: Axis, low: float, high: float) -> None:
    """On a logarithmic axis from low to high that is short, 0.2 and 400 instead of 2 × 10⁻¹ and 4 × 10²."""
    if high / low > 50:
        return
    for which in (axis.set_major_formatter, axis.set_minor_formatter):
        which(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "1246" else "")


def save(figure: Figure, path: Path, *formats: str) -> None:
    """Write `path` with each of the endings; the same figure gives the same bytes."""
    import matplotlib

    with writing(path), matplotlib.rc_context({"svg.hashsalt": "excite"}):
        path.parent.mkdir(parents=True, exist_ok=True)
        for format in formats:
            undated = {"Date": None} if format == "svg" else {"Software": None}
            figure.savefig(path.with_suffix(f".{format}"), dpi=110, metadata=undated)


def _widest(curves: Curves) -> float:
    """Where the curves end: nine points of ten are misclassified in every variant, as far as they can be."""
    ends = [0.0]
    for seeds in curves.values():
        for split in PARTS:
            values = np.concatenate([np.asarray(margins[split].values) for margins in seeds])
            finite = np.sort(values[np.isfinite(values)])
            if len(finite):
                ends.append(float(finite[min(int(0.9 * len(values)), len(finite) - 1)]))
    return max(ends) or 1.0
