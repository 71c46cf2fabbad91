"""The picture of `regularization`: both solutions of Theorem 6, noise, problem 13, least squares. The first seed's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from excite.studies.figures import COLOURS, DASHES
from excite.studies.numbers import Numbers
from excite.studies.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Details = Mapping[str, list[Any]]


def draw(study: Study, scale: Any, details: Details, numbers: Sequence[Numbers]) -> dict[str, tuple[str, Figure]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    axes = figure.subplots(2, 4)
    six = [arm for arm in details if arm.startswith("Theorem 6")]
    for axis, arm in zip(axes[0], six):
        _path(axis, details[arm][0]["curves"]["1.0"])
        axis.set(title=f"{arm}, m = 1", xlabel="λ / 2‖X'y‖_q", xscale="log")
    axes[0, 0].set_ylabel("weights")
    _radii(axes[0, 3], details[six[1]][0]["curves"])
    _noise(axes[1, 0], details["equations 10 and 11"][0])
    inflated = {arm: found[0]["curve"] for arm, found in details.items() if arm.startswith("equation 13")}
    for number, (arm, curve) in enumerate(inflated.items()):
        words = arm.removeprefix("equation 13, ").replace(" the margin", "")
        style = {"color": COLOURS[number], "linestyle": DASHES[number], "linewidth": 1.8, "label": words}
        steps, norms, _, reach = zip(*curve)
        axes[1, 1].plot(steps, norms, **style)
        axes[1, 2].plot(steps, reach, **style)
    axes[1, 1].set(title="Problem 13: size of w", xlabel="step", ylabel="‖w‖", xscale="log", yscale="log")
    axes[1, 1].legend(fontsize=8)
    axes[1, 2].axhline(1, color="#888", linewidth=1)
    axes[1, 2].set(title="Problem 13: margin over ε", xlabel="step", ylabel="above 1: all within ε decided right")
    axes[1, 2].set(xscale="log", ylim=(0, 1.3))
    scales, constants, _ = zip(*details["section 2.1"][0]["curve"])
    axes[1, 3].loglog(scales, constants, "o-", color=COLOURS[2])
    axes[1, 3].set(title="Least squares, one step size", xlabel="size of the targets", ylabel="Lipschitz constant")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.title.set_fontsize(10)
    figure.suptitle(study.title, fontsize=13)
    return {"figure": (f"{study.title}: both solutions, noise, problem 13, least squares", figure)}


def _path(axis: Axes, curve: Sequence[Any]) -> None:
    """Lines: the regularized solution. Dots: the excited one, where there is one."""
    penalties = [penalty for penalty, _, _, _ in curve]
    for k in range(len(curve[0][2])):
        colour = COLOURS[k % len(COLOURS)]
        axis.plot(penalties, [w[k] for _, _, w, _ in curve], color=colour, linewidth=1.4)
        dots = [(penalty, v[k]) for penalty, _, _, v in curve if v is not None]
        axis.plot(*zip(*dots), "o", color=colour, markersize=3.5, alpha=0.8)
    axis.axvspan(1, max(penalties), color="#999", alpha=0.25, linewidth=0)


def _radii(axis: Axes, curves: Mapping[str, Sequence[Any]]) -> None:
    for number, (power, curve) in enumerate(curves.items()):
        found = [(penalty, radius) for penalty, radius, _, _ in curve if radius is not None]
        dashes: Any = DASHES[number]
        axis.plot(*zip(*found), color=COLOURS[number], linestyle=dashes, linewidth=1.8, label=f"m = {float(power):g}")
    axis.set(title="p = 2: the ε that matches λ", xlabel="λ / 2‖X'y‖_q", ylabel="ε", xscale="log", yscale="log")
    axis.legend(fontsize=8)


def _noise(axis: Axes, found: Mapping[str, Any]) -> None:
    copies, off = zip(*found["drawn"])
    axis.loglog(copies, off, "o-", color=COLOURS[1], label="noise drawn at random")
    axis.loglog(copies, [off[0] / c**0.5 for c in copies], ":", color="#888", label="1 / √copies")
    axis.plot([found["directions"][0]], [min(off) / 3], "v", color=COLOURS[2], label="2n directions: exact")
    axis.set(title="Noise instead of ridge", xlabel="copies of every point", ylabel="distance from ridge, relative")
    axis.legend(fontsize=8, loc="upper right")
