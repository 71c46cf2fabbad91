"""Section 5.1: regularization as excitation, and where the two part; section 2.1: a constant that no input bounds.

Theorem 6 (both solutions along λ), equations 10 and 11 (ghost measurements, noise), equation 13 (cross-entropy of inflated
points, whose optimum is unbounded), and least squares with targets of any size. The paper has no experiment on these:
sizes are ours. The seed draws the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from excite.studies.computed import Computed
from excite.studies.excitation.regularization_parts import compute
from excite.studies.figures import COLOURS, DASHES
from excite.studies.study import Claim, Scale, Study, Variant, VariantResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SIX = {norm: f"Theorem 6, p = {word}" for norm, word in (("1", "1"), ("2", "2"), ("inf", "∞"))}
NOISE, LINEAR = "equations 10 and 11", "section 2.1"
BELOW, ABOVE = "equation 13, ε below the margin", "equation 13, ε above the margin"
BOUNDED = "equation 13, ε below the margin, weights bounded"
_PAPER = "Persistency of excitation"


@dataclass(frozen=True, kw_only=True)
class RegressionScale(Scale):
    points: int
    inputs: int
    grid: int  # values of λ
    steps: int


SCALES = {
    "quick": RegressionScale(
        name="quick", seeds=3, points=20, inputs=4, grid=12, steps=5_000, every_variant=True,
        words="20 points in 4 dimensions, 12 values of λ, 5,000 steps, 3 seeds",
    ),
    "paper": RegressionScale(
        name="paper", seeds=6, points=30, inputs=6, grid=24, steps=20_000, every_variant=True,
        words="30 points in 6 dimensions, 24 values of λ, 20,000 steps, 6 seeds",
    ),
}  # fmt: skip


def variants(scale: RegressionScale) -> list[Variant]:
    base = {"points": scale.points, "inputs": scale.inputs}
    six = {**base, "part": "equivalence", "grid": scale.grid, "powers": [1.0, 1.5, 2.0, 3.0]}
    inflated = {**base, "part": "inflated", "lr": 0.1, "steps": scale.steps, "decay": 0.0, "radius": 0.9}
    return [
        *(Variant(name, {**six, "norm": norm}) for norm, name in SIX.items()),
        Variant(NOISE, {**base, "part": "noise", "penalty": 0.1, "copies": [1, 3, 10, 30, 100, 300, 1000]}),
        Variant(BELOW, inflated),
        Variant(ABOVE, {**inflated, "radius": 1.5}),
        Variant(BOUNDED, {**inflated, "decay": 0.1}),
        Variant(LINEAR, {**base, "part": "linear", "steps": scale.steps, "scales": [1.0, 10.0, 100.0, 1000.0]}),
    ]


def _claim(text: str, where: str, measure: str, variant: str, name: str, **limit: float) -> Claim:
    source = f"{_PAPER}, {where}"
    return Claim(text, source, f"{variant}: {measure}", (variant,), lambda n: n[variant].values[name], **limit)


def claims(scale: RegressionScale) -> list[Claim]:
    near = "points near the training data"
    return [
        *(
            _claim("where λ does not give zero, an ε gives the same solution", "Theorem 6",
                   "largest difference of Xw and ‖w‖, relative, over λ and m", variant, "difference", below=1e-6)
            for variant in SIX.values()
        ),
        _claim("every λ has such an ε", "Theorem 6", "values of λ without one, all with m = 1", SIX["2"], "alone", below=0.5),
        _claim("n ghost measurements give the ridge solution", "equation 10", "relative difference", NOISE, "ghosts",
               below=1e-9),
        _claim("2n directions of noise at every point give the ridge solution", "equation 11", "relative difference", NOISE,
               "directions", below=1e-9),
        _claim("problem 13 is not convex", "section 5.1",
               "pairs of weights, of 2,000, with the loss in their middle above the chord", BELOW, "above", above=0.5),
        _claim("problem 13 has no finite optimum while ε is below the margin", "section 5.1",
               "growth of ‖w‖ over the last nine tenths of training", BELOW, "growth", above=0.1),
        _claim(f"and its solution generalizes to all {near}", "section 5.1",
               "distance of the nearest training point from the boundary over ε", BELOW, "reach", above=1.0),
        _claim("problem 13 has a finite optimum once ε is above the margin", "section 5.1, by contrast",
               "growth of ‖w‖ over the last nine tenths of training", ABOVE, "growth", below=0.01),
        _claim(f"bounding the weights keeps it from generalizing to all {near}", "section 5.1",
               "distance of the nearest training point from the boundary over ε", BOUNDED, "reach", below=1.0),
        _claim("gradient descent on least squares converges with the same step however large the targets", "section 2.1",
               "gradient left, relative to the first", LINEAR, "unconverged", below=1e-6),
        _claim("and the Lipschitz constant of a linear estimator grows with them without bound", "section 2.1",
               "constant for targets 1,000 times as large over the first", LINEAR, "lipschitz", above=999.0),
    ]  # fmt: skip


Details = Mapping[str, list[Any]]


def draw(study: Study, scale: Any, details: Details, numbers: Sequence[VariantResult]) -> dict[str, tuple[str, Figure]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    axes = figure.subplots(2, 4)
    six = [variant for variant in details if variant.startswith("Theorem 6")]
    for axis, variant in zip(axes[0], six):
        _path(axis, details[variant][0]["curves"]["1.0"])
        axis.set(title=f"{variant}, m = 1", xlabel="λ / 2‖X'y‖_q", xscale="log")
    axes[0, 0].set_ylabel("weights")
    _radii(axes[0, 3], details[six[1]][0]["curves"])
    _noise(axes[1, 0], details["equations 10 and 11"][0])
    inflated = {variant: found[0]["curve"] for variant, found in details.items() if variant.startswith("equation 13")}
    for number, (variant, curve) in enumerate(inflated.items()):
        words = variant.removeprefix("equation 13, ").replace(" the margin", "")
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


STUDY = Study(
    "regularization",
    "Regularization as excitation, and where they part",
    "Theorem 6, equations 10 to 13 and section 2.1 of Persistency of Excitation for Robustness of Neural Networks",
    "Linear models on small random data",
    Computed(
        compute,
        {
            "difference": ("difference of both solutions", "{:.1e}"),
            "alone": ("λ without ε", "{:.0f}"),
            "ghosts": ("ghost measurements, off by", "{:.1e}"),
            "directions": ("2n directions, off by", "{:.1e}"),
            "many": ("1,000 draws, off by", "{:.1e}"),
            "norm": ("‖w‖", "{:.3g}"),
            "growth": ("its growth", "{:.2f}"),
            "reach": ("margin over ε", "{:.2f}"),
            "lipschitz": ("constant, targets × 1,000", "{:.4g}"),
        },
        draw,
        "First row: the weights along the penalty λ‖w‖_p, m = 1 (lines), and the solution of the excited problem with the matching ε\n"
        "(dots); in the shaded part the penalty gives zero and no ε does; and which ε matches. Second row: how far the solution\n"
        "with drawn noise is from ridge regression; the norm of w and its margin over ε for problem 13; the Lipschitz constant\n"
        "of least squares with larger targets.",
        "Means over seeds, and the range; a dash where a variant has no such number. Both solutions of Theorem 6 are found separately,\n"
        "for m = 1, 1.5, 2, 3; they need not be unique for p = 1 and ∞, so Xw and ‖w‖_p are compared.",
        (
            "Losses are sums over points. Equation 13 in the 2-norm, without a bias, ε = 0.9 or 1.5 times the largest margin.",
        ),
    ),
    SCALES,
    variants,
    claims,
    (
        "Theorem 6 with m = 1: from λ = 2‖X'y‖_q on the penalty gives zero, and no ε does.",
        "Problem 13 is convex: each pair of terms is a convex function of (w·x, ε‖w‖), even and so increasing in ε‖w‖ ≥ 0.",
        "Weights are bounded by adding 0.1‖w‖² to the loss.",
    ),
)
