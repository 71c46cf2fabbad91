"""Figure 2: a linear classifier trained with cross-entropy, its margin over training, and what Theorem 2 says of it.

Gradient descent with momentum on the mean of log(1 + exp(−s(w·x + b)/5)), full batches, float64. The seed draws the initial
weights, and the points of the second set; seed k here is the authors' k + 1, who show seed 1. Margins are negative while
a point lies on the wrong side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from excite.bounds import linear_margin, relaxed_linear_margin
from excite.bounds.excitation.hard_margin import Array, limit_hyperplane, margin_of, optimal_hyperplane
from excite.studies.computed import Computed, OnProgress, Outcome, StepsScale
from excite.studies.figures import COLOURS
from excite.studies.study import Claim, Study, Variant, VariantResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LEFT, RIGHT, THREE = "two ellipses", "a line", "three points"
LEFT_SCALED, RIGHT_SCALED = "two ellipses, scaled", "a line, centred and scaled"
ROUNDING = 1e-9  # a bound that is met exactly may be passed by this much, relative to it
_POOR = "the decision boundary of a linear classifier could also have an extremely poor margin"
_STATED = (
    "the minimization of the cross-entropy loss yields a margin smaller than or equal to 1/√(1/γ²_OPT + B² Σ_k Δ_k²)"
)
_UNAVOIDABLE = "having a poor margin is unavoidable when the crossentropy loss is used for low-dimensional data sets"
_FIGURE = "Persistency of excitation, section 1, figure 2"
_THEOREM = "Persistency of excitation, Theorem 2"


SCALES = {
    "quick": StepsScale(
        name="quick", seeds=3, steps=20_000, every_variant=True, words="20,000 steps instead of 100,000, 3 seeds instead of 6"
    ),
    "paper": StepsScale(
        name="paper", seeds=6, steps=100_000, every_variant=True, words="the authors' settings: 100,000 steps; 6 seeds"
    ),
}  # fmt: skip


def variants(scale: StepsScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    base = {"steps": scale.steps, "lr": 1e-2, "momentum": 0.9, "divide": 5.0}
    return [
        Variant(LEFT, {**base, "data": LEFT}),
        Variant(RIGHT, {**base, "data": RIGHT}),
        Variant(THREE, {**base, "data": THREE}, extra=True),
        Variant(LEFT_SCALED, {**base, "data": LEFT, "scaled": True}, extra=True),
        Variant(RIGHT_SCALED, {**base, "data": RIGHT, "scaled": True}, extra=True),
    ]


def data(name: str, seed: int) -> tuple[Array, Array]:
    """Points (N, 2) and labels (N,)."""
    if name == THREE:  # the smallest known set on which Theorem 2 fails as printed
        return np.array([[-3.0, 3.0], [-2.0, 4.0], [-1.0, 2.0]]), np.array([1.0, 0.0, 0.0])
    labels = np.repeat([1.0, 0.0], 20)
    if name == LEFT:
        t = 2 * np.pi * np.arange(20) / 20
        first_class = -35 + 58 * np.stack([np.cos(t), np.sin(t - np.pi / 8)], 1)
        other = 35 + 35 * np.stack([np.cos(t), np.sin(t - np.pi / 2.3)], 1)
        return np.concatenate([first_class, other]), labels
    draws = np.random.RandomState(seed)
    u = np.concatenate([2 - 0.8 * draws.rand(20), 4 - 0.8 * draws.rand(20)])
    return np.stack([u, 10 + 20 * u], 1), labels


def first_weights(seed: int) -> Array:
    """(w, b) as torch.nn.Linear(2, 1) starts."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.empty(n).uniform_(-(2**-0.5), 2**-0.5, generator=generator) for n in (2, 1)]
    return np.asarray(torch.cat(drawn).double().numpy())


def train(
    x: Array, y: Array, first: Array, settings: Mapping[str, Any], on_progress: OnProgress
) -> tuple[Array, list[tuple[int, float]]]:
    """The last (w, b), and the margin at some steps, evenly on a logarithmic scale."""
    steps, s = settings["steps"], 2 * y - 1
    looked_at = set(np.unique(np.geomspace(1, steps, 120).round()).astype(int).tolist())
    rows = np.column_stack([x, np.ones(len(x))])
    theta, velocity = first, np.zeros_like(first)
    curve = []
    for step in range(1, steps + 1):
        f = rows @ theta / settings["divide"]
        slope = -s / (1 + np.exp(np.clip(s * f, -500, 500))) / len(y)
        velocity = settings["momentum"] * velocity + slope @ rows / settings["divide"]
        theta = theta - settings["lr"] * velocity
        if step in looked_at:
            curve.append((step, margin_of(theta[:-1], float(theta[-1]), x, s)))
            on_progress(step / steps)
    return theta, curve


def compute(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Computes the numbers of one variant and seed."""
    x, y = data(settings["data"], seed + 1)
    centre, unit = np.zeros(2), 1.0
    if settings.get("scaled"):
        centre = x.mean(0)
        unit = float(np.linalg.norm(x - centre, axis=1).max())
    z, s = (x - centre) / unit, 2 * y - 1
    theta, curve = train(z, y, first_weights(seed + 1), settings, on_progress)
    bound, relaxed = linear_margin(z, y), relaxed_linear_margin(z, y)
    if bound.value is None:  # every set here is separable
        raise ArithmeticError(str(bound))
    limit, best = limit_hyperplane(z, s), optimal_hyperplane(x, s)
    margin = curve[-1][1] * unit
    values = {
        "margin": margin,
        "limit": bound.terms["limit margin"] * unit,
        "optimal": best.margin,
        "share": margin / best.margin,
        "bound": bound.value * unit,
        "printed": bound.terms["printed"] * unit,
        "relaxed": np.nan if relaxed.value is None else relaxed.value * unit,
        "mean": float(np.linalg.norm(x.mean(0)) / np.linalg.norm(x - x.mean(0), axis=1).max()),
    }

    def line(w: Array, b: float) -> list[float]:  # in the units of x
        return [*(w / unit).tolist(), b - float(w @ centre) / unit]

    detail = {
        "points": x.round(4).tolist(),
        "labels": y.tolist(),
        "curve": [(step, value * unit) for step, value in curve],
        "trained": line(theta[:-1], float(theta[-1])),
        "limit": line(limit.weight, limit.bias),
        "optimal": [*best.weight.tolist(), best.bias],
        **{name: values[name] for name in ("bound", "printed")},
        "margins": {name: values[name] for name in ("margin", "limit", "optimal")},
    }
    flags = () if margin > 0 else (f"seed {seed} does not separate its points",)
    return Outcome(values, detail, flags)


def _poor(text: str, source: str, variant: str) -> Claim:
    return Claim(
        text, source, f"{variant}: margin over the optimal margin", (variant,), lambda n: n[variant].share, below=0.5
    )


def _bounded(text: str, source: str, variant: str, bound: str) -> Claim:
    return Claim(
        text,
        source,
        f"{variant}: margin of the limit of training over the bound, minus 1",
        (variant,),
        lambda n: n[variant].limit / n[variant].values[bound] - 1,
        below=ROUNDING,
        kind="universal",
    )


def claims(scale: StepsScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    unavoidable = "Persistency of excitation, section 3.1: a poor margin is unavoidable where data are low-dimensional"
    return [
        _poor("the margin is extremely poor, less than half of the optimal one, on the left", _FIGURE, LEFT).quoting(_POOR, "threshold"),
        _poor("and on the right", _FIGURE, RIGHT).quoting(_POOR, "threshold"),
        *(
            _bounded(f"the bound as printed holds, {variant}", _THEOREM, variant, "printed").quoting(_STATED)
            for variant in (LEFT, RIGHT, THREE)
        ),
        *(
            _bounded(f"the bound with the optimal margin of the support vectors holds, {variant}", "excite.bounds.linear_margin",
                     variant, "bound").quoting(_STATED, "ours") for variant in (LEFT, RIGHT, THREE)
        ),
        *(
            Claim(
                f"the bound accounts for the poor margin {where}: it is less than half of the optimal one",
                "Persistency of excitation, section 3.1",
                f"{variant}: bound that holds over the optimal margin",
                (variant,),
                lambda n, variant=variant: n[variant].bound / n[variant].optimal,  # type: ignore[misc]
                below=0.5,
                kind="universal",
            ).quoting(
                "the margin obtained with cross-entropy minimization will be much smaller than the optimal value if the support "
                "vectors of the data set lie in a low dimensional affine subspace",
                "threshold",
            )
            for variant, where in ((LEFT, "on the left"), (RIGHT, "on the right"))
        ),
        _poor("with the data divided by their size the margin stays poor on the left", unavoidable, LEFT_SCALED).quoting(_UNAVOIDABLE, "threshold"),
        _poor("and with the mean removed too on the right", unavoidable, RIGHT_SCALED).quoting(_UNAVOIDABLE, "threshold"),
    ]  # fmt: skip


BLACK, ORANGE, BLUE, GREEN, PINK = COLOURS[:5]
_BOUNDS = (("bound", "Theorem 2, as it holds", ORANGE, "--"), ("printed", "Theorem 2, as printed", PINK, (0, (1, 1))))


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Draws the figures of the study."""
    plain = {variant: detail for variant, detail in details.items() if "scaled" not in variant}
    scaled = {variant: detail for variant, detail in details.items() if "scaled" in variant}
    figures = {"figure": (f"{study.title}: boundaries and margins", columns(plain, study.title))}
    if scaled:
        figures["scaled"] = (
            "The same after the data are centred and scaled",
            columns(scaled, "Centred and scaled data"),
        )
    return figures


def columns(details: Mapping[str, list[Any]], title: str) -> Figure:
    """Of the first seed, as the authors: bounds differ between seeds where these draw the data."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.2 + 3.6 * len(details), 7.6), layout="constrained")
    above, below = figure.subplots(2, len(details), squeeze=False)
    for (variant, seeds), plane, curve in zip(details.items(), above, below):
        _plane(plane, seeds[0])
        _curve(curve, seeds[0])
        plane.set_title(variant, fontsize=11)
    below[0].set_ylabel("distance of the nearest training point")
    handles, labels = below[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.suptitle(title, fontsize=13)
    return figure


def _plane(axis: Axes, result: Mapping[str, Any]) -> None:
    points, labels = np.array(result["points"]), np.array(result["labels"])
    for label, colour in ((1.0, BLUE), (0.0, ORANGE)):
        axis.scatter(points[labels == label, 0], points[labels == label, 1], s=14, color=colour, zorder=3)
    middle, half = (points.min(0) + points.max(0)) / 2, 0.7 * float(np.ptp(points, axis=0).max())
    for name, colour, dashes, legend in (
        ("trained", BLACK, "-", "trained"),
        ("optimal", GREEN, "--", "largest margin"),
    ):
        w, b = np.array(result[name][:2]), result[name][2]
        foot = middle - w * (w @ middle + b) / (w @ w)
        along = 4 * half * np.array([-w[1], w[0]]) / np.linalg.norm(w)
        axis.plot(
            *np.stack([foot - along, foot + along]).T, color=colour, linestyle=dashes, linewidth=1.8, label=legend
        )
    axis.set(xlim=(middle[0] - half, middle[0] + half), ylim=(middle[1] - half, middle[1] + half), aspect="equal")
    axis.tick_params(labelsize=8)
    axis.legend(loc="best", fontsize=8)


def _curve(axis: Axes, first: Mapping[str, Any]) -> None:
    steps, margins = np.array(first["curve"]).T
    axis.plot(steps, np.maximum(margins, 1e-9), color=BLACK, linewidth=1.8, label="margin")
    axis.axhline(first["margins"]["limit"], color=BLACK, linestyle=":", linewidth=1.2, label="limit of training")
    axis.axhline(
        first["margins"]["optimal"], color=GREEN, linewidth=1.6, label="largest margin (support vector machine)"
    )
    for name, label, colour, dashes in _BOUNDS:
        axis.axhline(first[name], color=colour, linestyle=dashes, linewidth=1.8, label=label)
    top = max(first["margins"]["optimal"], first["bound"])
    axis.set(
        xscale="log", yscale="log", xlabel="step of training", ylim=(min(top / 20, first["printed"] / 3), 1.5 * top)
    )
    axis.grid(alpha=0.3, which="both")


STUDY = Study(
    "linear-margin",
    "The margin of a linear classifier trained with cross-entropy",
    "figure 2 and Theorem 2 of Persistency of Excitation for Robustness of Neural Networks",
    "Two separable sets in the plane; and three points on which the theorem fails as printed",
    Computed(
        compute,
        {
            "margin": ("margin", "{:.3g}"),
            "limit": ("limit of training", "{:.4g}"),
            "bound": ("Theorem 2, as it holds", "{:.4g}"),
            "printed": ("as printed", "{:.4g}"),
            "relaxed": ("Corollary 2", "{:.4g}"),
            "optimal": ("optimal margin", "{:.4g}"),
            "share": ("margin over optimal", "{:.2f}"),
        },
        draw,
        "The first seed, the authors'. Above: the boundary after training (solid) and the one with the largest margin, a support vector\n"
        "machine's (dashed). Below: the margin over training, its limit, and the bounds. The margin is shown\n"
        "once all points are classified correctly.",
        "Means over seeds, with the range, in the units of the data. *Limit of training* is the margin of the direction that gradient\n"
        "descent converges to, solved for exactly. Theorem 2 uses the optimal margin of all points as printed, and holds with\n"
        "that of the support vectors. *Scaled*: the mean is removed and points divided by the largest norm before training.\n"
        "*Trusted*: classifiers that classify all training points correctly.",
        ("Cross-entropy is a mean over points; learning rate 0.01, momentum 0.9, outputs divided by 5, float64.",),
    ),
    SCALES,
    variants,
    claims,
    (
        "The left set has mean zero, so that scaling is all that differs in its scaled variant.",
        "On the left three support vectors span the plane: no subspace holds them, and the theorem says no more than the support "
        "vector machine does. The margin is poor there because of the bias, which costs as much as a weight, however large the data are.",
    ),
    asks="is the linear margin poor?",
    seconds={"quick": 13, "paper": 260},
    sources=(
        "persistency:figure 2",
        "persistency:Theorem 2",
    ),
)
