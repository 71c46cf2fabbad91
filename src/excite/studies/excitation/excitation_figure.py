"""The figure of `excitation-basics`: a panel for each experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from excite.studies.figures import COLOURS
from excite.studies.numbers import Numbers
from excite.studies.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FADING, PERSISTENT, BETWEEN = COLOURS[1], COLOURS[2], COLOURS[3]
FLOOR = 1e-16  # smaller distances are rounding
# title, y axis, whether it is logarithmic, and the experiment's arms with their colours and dashes
PANELS: dict[str, tuple[str, str, bool, dict[str, tuple[str, str]]]] = {
    "regression": (
        "Regression, measurements\nmultiplied by α each step",
        "distance of θ from the truth",
        True,
        {"attenuated quickly": (FADING, "--"), "attenuated slowly": (BETWEEN, "-."), "persistent": (PERSISTENT, "-")},
    ),
    "scalar system": (
        "x ← θx + u,\nθ learnt from the error",
        "distance of θ from the truth",
        True,
        {"no input": (FADING, "--"), "random signs": (PERSISTENT, "-")},
    ),
    "linear system": (
        "System of order two,\nfour numbers to learn",
        "distance from the truth",
        True,
        {"constant input": (FADING, "--"), "one frequency": (BETWEEN, "-."), "two frequencies": (PERSISTENT, "-")},
    ),
    "stochastic gradient": (
        "Stochastic gradient,\nobjective scaled down",
        "distance from the optimum",
        True,
        {"scaled down too fast": (FADING, "--"), "not scaled": (BETWEEN, "-."), "scaled down slowly": (PERSISTENT, "-")},
    ),
    "bandit": (
        "Two-armed bandits",
        "share that prefers the worse arm",
        False,
        {"stops exploring": (FADING, "--"), "goes on exploring": (PERSISTENT, "-")},
    ),
    "node": (
        "A node x₁x₂ that no\ntraining point excites",
        "weight behind the node",
        False,
        {
            "plain": (FADING, "--"),
            "input excited": (COLOURS[4], ":"),
            "input excited exactly": (BETWEEN, "-."),
            "every layer excited": (PERSISTENT, "-"),
        },
    ),
}  # fmt: skip


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[Numbers]
) -> dict[str, tuple[str, Figure]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.2, 7.2), layout="constrained")
    axes = figure.subplots(2, 4).ravel()
    for axis, (experiment, (title, words, logarithmic, lines)) in zip(axes, PANELS.items()):
        for how, (colour, dashes) in lines.items():
            _curve(axis, details[f"{experiment}: {how}"], how, colour, dashes)
        axis.set(title=title, xlabel="steps", ylabel=words, xscale="log")
        axis.set(**({"yscale": "log", "ylim": (FLOOR / 3, 3)} if logarithmic else {"ylim": (0, 1.1)}))
        if experiment == "stochastic gradient":
            axis.set_ylim(1e-3, 2)
        if experiment == "bandit":
            axis.set_ylim(0, 0.5)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="best")
    _boundaries(axes[6], details["centring: mean removed"][0])
    _margins(axes[7], numbers)
    figure.suptitle(f"{study.title} (scale {scale.name})", fontsize=13)
    return {"figure": ("Experiments with an excitation that fades and with one that persists", figure)}


def _curve(axis: Axes, seeds: Sequence[Mapping[str, Any]], label: str, colour: str, dashes: str) -> None:
    at = 1 + np.array(seeds[0]["at"])
    curves = np.maximum(np.array([seed["curve"] for seed in seeds], dtype=float), FLOOR)
    axis.plot(at, np.median(curves, 0), color=colour, linestyle=dashes, linewidth=2, label=label)
    axis.fill_between(at, curves.min(0), curves.max(0), color=colour, alpha=0.15, linewidth=0)


def _boundaries(axis: Axes, one: Mapping[str, Any]) -> None:
    """The points of one seed with their mean at the origin, where descent ends and where the margin is widest."""
    points, signs = np.array(one["points"]), np.array(one["signs"])
    for sign, marker in ((1, "o"), (-1, "s")):
        axis.plot(
            *points[signs == sign].T, marker, color="#888" if sign > 0 else "#222", markersize=4, linestyle="none"
        )
    reach = 1.15 * np.abs(points).max()
    for name, label, colour, dashes in (
        ("limit", "gradient descent", FADING, "--"),
        ("best", "widest margin", PERSISTENT, "-"),
    ):
        *weight, bias = one[name]
        w = np.array(weight)
        foot, along = -bias * w / (w @ w), np.array([-w[1], w[0]]) / np.linalg.norm(w)
        ends = np.stack([foot - 3 * reach * along, foot + 3 * reach * along])
        axis.plot(*ends.T, color=colour, linestyle=dashes, linewidth=2, label=label)
    axis.plot(0, 0, "k+", markersize=12, label="mean of the points")
    axis.set(title="Cross-entropy on points\nwhose mean is removed", xlim=(-reach, reach), ylim=(-reach, reach))
    axis.set_aspect("equal")
    axis.legend(fontsize=8, loc="lower right")


def _margins(axis: Axes, numbers: Sequence[Numbers]) -> None:
    hows = {"origin elsewhere": BETWEEN, "mean removed": FADING, "support vectors centred": PERSISTENT}
    for row, (how, colour) in enumerate(hows.items()):
        values = [found.margin for found in numbers if found.arm == f"centring: {how}"]
        axis.plot(values, [row] * len(values), "o", color=colour, alpha=0.6, markeredgewidth=0)
        axis.plot([float(np.mean(values))], [row], "|", color="k", markersize=18, markeredgewidth=2)
    axis.set_yticks(range(3), [how.replace(" ", "\n", 1) for how in hows])
    axis.set(
        title="Margin by place of the origin\n(a dot a seed, bar: mean)",
        xlabel="margin over the optimal one",
        xlim=(0, 1.05),
    )
    axis.set_ylim(2.5, -0.5)
    axis.grid(axis="x", alpha=0.3)
