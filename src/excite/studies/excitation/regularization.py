"""Section 5.1: regularization as excitation, and where the two part; section 2.1: a constant that no input bounds.

Theorem 6 (both solutions along λ), equations 10 and 11 (ghost measurements, noise), equation 13 (cross-entropy of inflated
points, whose optimum is unbounded), and least squares with targets of any size. The paper has no experiment on these:
sizes are ours. The seed determines the data; losses are sums over points.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from excite._core.checks import DUAL, parse_norm
from excite.bounds import radius_of_penalty
from excite.bounds.excitation.hard_margin import least_norm
from excite.studies.computed import Computed, OnProgress, Outcome
from excite.studies.figures import COLOURS, DASHES
from excite.studies.study import Claim, Scale, Study, Variant, VariantResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Array = NDArray[np.float64]
SIX = {norm: f"Theorem 6, p = {word}" for norm, word in (("1", "1"), ("2", "2"), ("inf", "∞"))}
NOISE, LINEAR = "equations 10 and 11", "section 2.1"
BELOW, ABOVE = "equation 13, ε below the margin", "equation 13, ε above the margin"
BOUNDED = "equation 13, ε below the margin, weights bounded"
_PAPER = "Persistency of excitation"


@dataclass(frozen=True, kw_only=True)
class RegressionScale(Scale):
    """Sizes of the regression problems."""

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
    """Variants that are trained at a scale."""
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


def regression(seed: int, settings: Mapping[str, Any]) -> tuple[Array, Array]:
    """Points (N, n) of uneven variances and targets (N,) from weights of which half are zero, with noise."""
    rng = np.random.default_rng(seed)
    n = settings["inputs"]
    x = rng.normal(size=(settings["points"], n)) * np.geomspace(1, 0.3, n)
    w = rng.normal(size=n) * (np.arange(n) % 2 == 0)
    return x, x @ w + 0.3 * rng.normal(size=len(x))


def equivalence(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Theorem 6: for λ on a grid both solutions, and the ε that makes them one, for several powers m."""
    x, y = regression(seed, settings)
    norm = settings["norm"]
    largest = 2 * float(np.linalg.norm(x.T @ y, float(DUAL[parse_norm(norm)])))  # m = 1 gives zero from here on
    grid = largest * np.geomspace(1e-3, 3, settings["grid"])
    curves: dict[str, list[Any]] = {}
    differences, alone = [0.0], 0
    for number, power in enumerate(settings["powers"]):
        for k, penalty in enumerate(grid):
            result = radius_of_penalty(x, y, float(penalty), norm, power)
            excited = None if result.excited is None else result.excited.round(6).tolist()
            curves.setdefault(str(power), []).append(
                (float(penalty / largest), result.radius, result.regularized.round(6).tolist(), excited)
            )
            alone += result.radius is None
            differences += [result.difference] if result.radius is not None else []
            on_progress((number + k / len(grid)) / len(settings["powers"]))
    values = {"difference": max(differences), "alone": float(alone), "solved": float(len(differences) - 1)}
    return Outcome(values, {"curves": curves})


def noise(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Equations 10 and 11: ridge, n ghost measurements, 2n directions of noise, and noise drawn at random."""
    x, y = regression(seed, settings)
    count, n = x.shape
    penalty = settings["penalty"] * count
    ridge = np.linalg.solve(x.T @ x + penalty * np.eye(n), x.T @ y)

    def off(rows: Array, targets: Array) -> float:
        result = np.linalg.lstsq(rows, targets, rcond=None)[0]
        return float(np.linalg.norm(result - ridge) / np.linalg.norm(ridge))

    ghosts = off(np.vstack([x, math.sqrt(penalty) * np.eye(n)]), np.r_[y, np.zeros(n)])
    moves = math.sqrt(n * penalty / count) * np.vstack([np.eye(n), -np.eye(n)])  # second moment penalty/count · I
    directions = off((x + moves[:, None]).reshape(-1, n), np.tile(y, len(moves)))
    rng = np.random.default_rng(seed + 1000)
    drawn = []
    for copies in settings["copies"]:
        xi = math.sqrt(penalty / count) * rng.normal(size=(copies, count, n))
        drawn.append((copies, off((x + xi).reshape(-1, n), np.tile(y, copies))))
    values = {"ghosts": ghosts, "directions": directions, "few": drawn[0][1], "many": drawn[-1][1]}
    return Outcome(values, {"drawn": drawn, "directions": (2 * n, directions)})


def two_classes(seed: int, settings: Mapping[str, Any]) -> tuple[Array, Array, float]:
    """Points (N, n), signs (N,) and the largest margin of a hyperplane through the origin, in the 2-norm."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(settings["points"], settings["inputs"]))
    normal = rng.normal(size=settings["inputs"])
    normal /= np.linalg.norm(normal)
    s = np.where(x @ normal > 0, 1.0, -1.0)
    x = x + 0.5 * s[:, None] * normal
    return x, s, 1 / float(np.linalg.norm(least_norm(s[:, None] * x)[0]))


def inflated_loss(w: Array, x: Array, s: Array, radius: float) -> float:
    """Equation 13 in the 2-norm: ½ Σ log(1 + exp(−s w·x − ε‖w‖)) + log(1 + exp(−s w·x + ε‖w‖))."""
    margins, offset = s * (x @ w), radius * float(np.linalg.norm(w))
    return float((np.logaddexp(0, -margins - offset) + np.logaddexp(0, -margins + offset)).sum()) / 2


def inflated_gradient(w: Array, x: Array, s: Array, radius: float) -> Array:
    """Gradient of the cross-entropy at the two extremes of ‖d‖ ≤ radius."""
    size = float(np.linalg.norm(w))
    margins, offset = s * (x @ w), radius * size
    far, near = (np.exp(-np.logaddexp(0, margins + sign * offset)) for sign in (1, -1))  # σ(−margins ∓ reach)
    outward = radius * w / max(size, 1e-300) * float((near - far).sum())
    return np.asarray((-(s * (far + near)) @ x + outward) / 2)


def inflated(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Gradient descent on equation 13 (plus decay · ‖w‖²), the radius a multiple of the largest margin."""
    x, s, margin = two_classes(seed, settings)
    radius, steps = settings["radius"] * margin, settings["steps"]
    w = np.asarray(1e-3 * np.random.default_rng(seed + 1000).normal(size=x.shape[1]))
    looked_at = set(np.unique(np.geomspace(1, steps, 60).round()).astype(int).tolist())
    curve = []
    for step in range(1, steps + 1):
        w = w - settings["lr"] * (inflated_gradient(w, x, s, radius) + 2 * settings["decay"] * w)
        if step in looked_at:
            size = float(np.linalg.norm(w))
            curve.append((step, size, inflated_loss(w, x, s, radius), float((s * (x @ w)).min()) / size / radius))
            on_progress(step / steps)
    early = next(size for step, size, _, _ in curve if step >= steps / 10)
    values = {
        "norm": curve[-1][1],
        "growth": curve[-1][1] / early - 1,
        "loss": curve[-1][2],
        "reach": curve[-1][3],
        "above": float(above_chord(x, s, radius, seed)),
    }
    return Outcome(values, {"curve": curve})


def above_chord(x: Array, s: Array, radius: float, seed: int, pairs: int = 2000) -> int:
    """How often F((u + v)/2) > (F(u) + F(v))/2 for random pairs of weights: never, if F is convex."""
    rng = np.random.default_rng(seed + 2000)
    result = 0
    for _ in range(pairs):
        u, v = rng.normal(size=(2, x.shape[1])) * np.exp(rng.uniform(-3, 3, size=(2, 1)))
        chord = (inflated_loss(u, x, s, radius) + inflated_loss(v, x, s, radius)) / 2
        result += inflated_loss((u + v) / 2, x, s, radius) > chord * (1 + 1e-12)
    return result


def linear_estimator(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Section 2.1: gradient descent on ½Σ‖Wx − f(x)‖² with one step size, for targets of growing size."""
    x, y = regression(seed, settings)
    hessian = x.T @ x
    step = 1 / float(np.linalg.eigvalsh(hessian)[-1])
    curve = []
    for scale in settings["scales"]:
        w = np.zeros(x.shape[1])
        for _ in range(settings["steps"]):
            w = w - step * (hessian @ w - scale * (x.T @ y))
        left = float(np.linalg.norm(hessian @ w - scale * (x.T @ y)) / np.linalg.norm(scale * (x.T @ y)))
        curve.append((scale, float(np.linalg.norm(w)), left))
        on_progress(len(curve) / len(settings["scales"]))
    first, last = curve[0], curve[-1]
    values = {
        "lipschitz": last[1] / first[1],
        "unconverged": max(left for _, _, left in curve),
    }
    return Outcome(values, {"curve": curve})


PARTS = {"equivalence": equivalence, "noise": noise, "inflated": inflated, "linear": linear_estimator}


def compute(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Computes the numbers of one variant and seed."""
    return PARTS[settings["part"]](settings, seed, on_progress)


_SAME = "For each λ, there exists some ϵ such that the solutions of the two problems are identical."
_BOUNDED = "enforcing boundedness of the parameters could prevent the discovery of the optimal solution"


def _claim(text: str, where: str, measure: str, variant: str, name: str, **limit: Any) -> Claim:
    source = f"{_PAPER}, {where}"
    return Claim(text, source, f"{variant}: {measure}", (variant,), lambda n: n[variant].values[name], **limit)


def claims(scale: RegressionScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    near = "points near the training data"
    return [
        *(
            _claim("where λ does not give zero, an ε gives the same solution", "Theorem 6",
                   "largest difference of Xw and ‖w‖, relative, over λ and m", variant, "difference", below=1e-6, kind="exact").quoting(_SAME, "weaker")
            for variant in SIX.values()
        ),
        _claim("every λ has such an ε", "Theorem 6", "values of λ without one, all with m = 1", SIX["2"], "alone", below=0.5, kind="universal").quoting(_SAME),
        _claim("n ghost measurements give the ridge solution", "equation 10", "relative difference", NOISE, "ghosts",
               below=1e-9, kind="exact").quoting("adding the regularization term is equivalent to adding n ghost measurements"),
        _claim("2n directions of noise at every point give the ridge solution", "equation 11", "relative difference", NOISE,
               "directions", below=1e-9, kind="exact").quoting(
                   "the ridge regression could be considered as augmenting the training data set by perturbing each training point in, "
                   "for example, 2n different directions"),
        _claim("problem 13 is not convex", "section 5.1",
               "pairs of weights, of 2,000, with the loss in their middle above the chord", BELOW, "above", above=0.5, kind="universal").quoting("This problem is not convex"),
        _claim("problem 13 has no finite optimum while ε is below the margin", "section 5.1",
               "growth of ‖w‖ over the last nine tenths of training", BELOW, "growth", above=0.1).quoting(
                   "this problem does not attain its global minimum at a finite point — as long as ϵ does not exceed the maximum p-norm "
                   "margin of the original data set", "threshold"),
        _claim(f"and its solution generalizes to all {near}", "section 5.1",
               "distance of the nearest training point from the boundary over ε", BELOW, "reach", above=1.0).quoting(
                   "the optimal solution is unbounded but generalizes perfectly for the unseen data near the training points"),
        _claim("problem 13 has a finite optimum once ε is above the margin", "section 5.1, by contrast",
               "growth of ‖w‖ over the last nine tenths of training", ABOVE, "growth", below=0.01, kind="universal").quoting("as long as ϵ does not exceed the maximum p-norm margin of the original data set", "ours"),
        _claim(f"bounding the weights keeps it from generalizing to all {near}", "section 5.1",
               "distance of the nearest training point from the boundary over ε", BOUNDED, "reach", below=1.0, kind="universal").quoting(_BOUNDED, "stronger"),
        _claim("gradient descent on least squares converges with the same step however large the targets", "section 2.1",
               "gradient left, relative to the first", LINEAR, "unconverged", below=1e-6, kind="exact").quoting("it does not require the step size to be small for convergence", "threshold"),
        _claim("and the Lipschitz constant of a linear estimator grows with them without bound", "section 2.1",
               "constant for targets 1,000 times as large over the first", LINEAR, "lipschitz", above=999.0, kind="exact").quoting("the spectral radius of Ŵ could be arbitrarily large", "threshold"),
    ]  # fmt: skip


Details = Mapping[str, list[Any]]


def draw(study: Study, scale: Any, details: Details, numbers: Sequence[VariantResult]) -> dict[str, tuple[str, Figure]]:
    """Draws the figures of the study."""
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
    inflated = {variant: detail[0]["curve"] for variant, detail in details.items() if variant.startswith("equation 13")}
    for number, (variant, curve) in enumerate(inflated.items()):
        label = variant.removeprefix("equation 13, ").replace(" the margin", "")
        style = {"color": COLOURS[number], "linestyle": DASHES[number], "linewidth": 1.8, "label": label}
        steps, norms, _, offset = zip(*curve)
        axes[1, 1].plot(steps, norms, **style)
        axes[1, 2].plot(steps, offset, **style)
    axes[1, 1].set(title="Problem 13: size of w", xlabel="step", ylabel="‖w‖", xscale="log", yscale="log")
    axes[1, 1].legend(fontsize=8)
    axes[1, 2].axhline(1, color="#888", linewidth=1)
    axes[1, 2].set(
        title="Problem 13: margin over ε", xlabel="step", ylabel="above 1: all within ε classified correctly"
    )
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
        result = [(penalty, radius) for penalty, radius, _, _ in curve if radius is not None]
        dashes: Any = DASHES[number]
        axis.plot(*zip(*result), color=COLOURS[number], linestyle=dashes, linewidth=1.8, label=f"m = {float(power):g}")
    axis.set(title="p = 2: the ε that matches λ", xlabel="λ / 2‖X'y‖_q", ylabel="ε", xscale="log", yscale="log")
    axis.legend(fontsize=8)


def _noise(axis: Axes, result: Mapping[str, Any]) -> None:
    copies, off = zip(*result["drawn"])
    axis.loglog(copies, off, "o-", color=COLOURS[1], label="noise drawn at random")
    axis.loglog(copies, [off[0] / c**0.5 for c in copies], ":", color="#888", label="1 / √copies")
    axis.plot([result["directions"][0]], [min(off) / 3], "v", color=COLOURS[2], label="2n directions: exact")
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
        "Means over seeds, with the range; a dash where a variant has no such number. Both solutions of Theorem 6 are found separately,\n"
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
    asks="is a penalty an excitation?",
    seconds={"quick": 12, "paper": 1330},
    sources=(
        "persistency:Theorem 6",
        "persistency:equation 10",
        "persistency:equation 11",
        "persistency:equation 12",
        "persistency:equation 13",
        "persistency:section 2.1",
    ),
)
