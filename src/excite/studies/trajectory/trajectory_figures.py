"""Pictures of the studies of trajectories: curves by frequency, one panel a quantity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from excite.studies.figures import DASHES
from excite.studies.study import Study, VariantResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#D55E00")  # cold to warm, and told apart by the colour-blind


def _curve(axis: Axes, at: str, repeats: list[Any], name: str, colour: str, dashes: Any, label: str) -> None:
    curves = np.array([found[name] for found in repeats])
    x = np.array(repeats[0][at])
    axis.plot(x, curves.mean(0), color=colour, linestyle=dashes, linewidth=1.8, label=label)
    axis.fill_between(x, curves.min(0), curves.max(0), color=colour, alpha=0.12, linewidth=0)
    axis.set_xlim(0, x[-1])


def _words(details: Mapping[str, list[Any]]) -> str:
    count = max(len(found) for found in details.values())
    return f"lines: means over {count} repeats, bands: lowest to highest" if count > 1 else "one repeat"


def batch_sizes(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Figure 9: loss, normalized update and test loss; a column a frequency would hide that scales differ, so one for both."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.4), layout="constrained")
    axes = figure.subplots(1, 3)
    panels = (
        ("loss", "training loss", "log"),
        ("mean", "normalized update, mean over samples", "linear"),
        ("test", "test loss", "log"),
    )
    for axis, (name, words, how) in zip(axes, panels):
        for number, (variant, repeats) in enumerate(details.items()):
            half = max(1, len(details) // 2)
            colour = _COLOURS[3 * (number // half)] if number // half < 2 else _COLOURS[1]
            _curve(axis, "steps", repeats, name, colour, DASHES[(number % half) % len(DASHES)], variant)
        axis.set(title=words, xlabel="step, thousands", yscale=how)
        axis.xaxis.set_major_formatter(lambda step, _: f"{step / 1000:g}")
        axis.grid(alpha=0.3)
    axes[1].set_ylim(bottom=0)
    axes[1].legend(fontsize=8, framealpha=0.9)
    figure.suptitle(f"{study.title}\n{_words(details)}", fontsize=12)
    return {"figure": (f"{study.title}: loss, normalized update and test loss by step", figure)}


def all_layers(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Figure 10: losses, and one panel for the bias of every layer."""
    from matplotlib.figure import Figure

    layers = sorted(name for name in next(iter(details.values()))[0] if name.startswith("length_"))
    panels = [("loss", "training loss"), ("test", "test loss")]
    panels += [(name, f"bias {name.removeprefix('length_')}: length of an epoch") for name in layers]
    figure = Figure(figsize=(13, 6.4), layout="constrained")
    axes = list(figure.subplots(2, (len(panels) + 1) // 2).flat)
    for axis, (name, words) in zip(axes, panels):
        for number, (variant, repeats) in enumerate(details.items()):
            _curve(axis, "epochs", repeats, name, _COLOURS[number % 4], DASHES[number % len(DASHES)], variant)
        axis.set(title=words, xlabel="epoch", yscale="log" if name in ("loss", "test") else "linear")
        if name not in ("loss", "test"):
            axis.set_ylim(0, 1.15 * axis.dataLim.ymax)
        axis.grid(alpha=0.3)
    last = axes[len(panels) - 1]
    last.text(
        0.5, 0.5, "one a step, by definition:\nz of the last layer is f itself", ha="center", transform=last.transAxes
    )
    for axis in axes[len(panels) :]:
        axis.axis("off")
    handles, words = axes[0].get_legend_handles_labels()
    axes[-1].legend(handles, words, loc="center", fontsize=11, frameon=False)
    figure.suptitle(f"{study.title}\n{_words(details)}", fontsize=12)
    return {"figure": (f"{study.title}: losses, and the length of an epoch for every bias, by frequency", figure)}
