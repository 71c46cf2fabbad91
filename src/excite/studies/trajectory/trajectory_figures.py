"""Curves and dots that the figures of the trajectory studies share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from excite.studies.figures import DASHES
from excite.studies.study import VariantResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00")  # cold to warm, and distinguishable by the colour-blind


def bands(details: Mapping[str, list[Any]]) -> str:
    """Legend of the lines and bands of `curve`, for the title of a figure."""
    count = max(len(repeats) for repeats in details.values())
    return f"lines: means over {count} repeats, bands: lowest to highest" if count > 1 else "one repeat"


def curve(
    axis: Axes, repeats: Sequence[Mapping[str, Any]], name: str, along: str, label: str, colour: str, dashes: Any
) -> None:
    """The mean over repeats, and a band from the lowest to the highest."""
    x = np.array(repeats[0][along])
    y = np.array([repeat[name] for repeat in repeats])  # (repeats, points)
    axis.plot(x, y.mean(0), color=colour, linestyle=dashes, linewidth=2, label=label)
    axis.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.15, linewidth=0)
    axis.set_xlim(0, x[-1])


def curves(
    axis: Axes, details: Mapping[str, list[Any]], name: str, along: str = "epochs", colours: Sequence[str] = COLOURS
) -> None:
    """One `curve` per variant."""
    for number, (variant, repeats) in enumerate(details.items()):
        curve(axis, repeats, name, along, variant, colours[number % len(colours)], DASHES[number % len(DASHES)])


def dots(axis: Axes, variants: Sequence[str], numbers: Sequence[VariantResult], name: str) -> None:
    """One dot per network, and a bar at the geometric mean of each variant."""
    for number, variant in enumerate(variants):
        values = np.array([result.values[name] for result in numbers if result.variant == variant])
        axis.plot(
            [number] * len(values), values, "o", color=COLOURS[number % len(COLOURS)], alpha=0.6, markeredgewidth=0
        )
        mean = float(np.exp(np.log(values).mean()))
        axis.plot([number], [mean], "_", color="black", markersize=26, markeredgewidth=2)
    axis.set_xticks(range(len(variants)), [variant.removeprefix("ω = ") for variant in variants])
    axis.set_xlim(-0.5, len(variants) - 0.5)
