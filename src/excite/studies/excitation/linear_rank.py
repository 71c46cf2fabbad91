"""Theorems 4 and 5: deep linear networks z = W_L ⋯ W_1 x with one output whose layers become one direction.

Losses are sums over points, in float64. The paper has no experiment on them: sizes, data and steps are ours. The seed determines
points and first weights, the same for all variants. Weights trained by cross-entropy grow like a power of log(steps): growing
steps, each a thousandth of the weights' size, take them where steps of a fixed size would need exponentially many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from excite.bounds import alignment, cross_entropy_rank, decay_rank
from excite.bounds.excitation.linear_rank import cross_entropy
from excite.studies.computed import Computed, OnProgress, Outcome
from excite.studies.figures import COLOURS
from excite.studies.study import Claim, Scale, Study, Variant, VariantResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Array = NDArray[np.float64]
Weights = list[Array]
DECAY = {loss: f"{loss}, decay" for loss in ("cross-entropy", "squared error", "squared hinge")}
STRONG, GROWING = "cross-entropy, strong decay", "cross-entropy, growing steps"
DESCENT, SMALL = "cross-entropy, gradient descent", "cross-entropy, small first weights"
PLAIN = "squared error, no decay"
RANK_ONE = 0.1  # a layer with σ₂ below this fraction of σ₁ counts as one direction
MEASUREMENTS = 40  # at the singular values, evenly on a logarithmic scale
GONE = 1e-9  # a layer whose largest singular value is below this has no direction left
STRIDE = 1e-3  # length of a growing step, relative to the norm of the weights


@dataclass(frozen=True, kw_only=True)
class RankScale(Scale):
    """Steps, widths and number of points."""

    steps: int
    widths: tuple[int, ...]
    points: int


SCALES = {
    "quick": RankScale(
        name="quick", seeds=3, steps=10_000, widths=(6, 6, 6), points=20, every_variant=True,
        words="20 points in 6 dimensions, three layers of width 6, 10,000 steps, 3 seeds",
    ),
    "paper": RankScale(
        name="paper", seeds=6, steps=25_000, widths=(10, 10, 10, 10), points=40, every_variant=True,
        words="40 points in 10 dimensions, four layers of width 10, 25,000 steps, 6 seeds",
    ),
}  # fmt: skip


def variants(scale: RankScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    base = {"steps": scale.steps, "widths": list(scale.widths), "points": scale.points, "lr": 2e-3, "gain": 1.0}
    plain = {**base, "loss": "cross-entropy", "decay": 0.0}
    return [
        *(Variant(name, {**base, "loss": loss, "decay": 0.1}) for loss, name in DECAY.items()),
        Variant(STRONG, {**plain, "decay": 10.0}),
        Variant(GROWING, {**plain, "growing": True}),
        Variant(DESCENT, plain),
        Variant(SMALL, {**plain, "gain": 0.05}),
        Variant(PLAIN, {**plain, "loss": "squared error"}),
    ]


def data_and_weights(seed: int, settings: Mapping[str, Any]) -> tuple[Array, Array, Weights]:
    """Points (N, n) that a hyperplane through the origin separates with a margin, labels (N,), and first weights."""
    rng = np.random.default_rng(seed)
    widths = [*settings["widths"], 1]
    normal = rng.normal(size=widths[0])
    normal /= np.linalg.norm(normal)
    x = rng.normal(size=(settings["points"], widths[0]))
    s = np.where(x @ normal > 0, 1.0, -1.0)
    shapes = zip(widths[1:], widths)
    weights = [settings["gain"] * rng.normal(size=(out, into)) / np.sqrt(into) for out, into in shapes]
    return x + 0.3 * s[:, None] * normal, (s + 1) / 2, weights


# By loss: the derivative with respect to outputs z (N,), and the sum itself, for autograd. s = ±1.
SLOPES: dict[str, Callable[[Array, Array], Array]] = {
    "cross-entropy": lambda z, s: -s * np.exp(-np.logaddexp(0, s * z)),
    "squared error": lambda z, s: 2 * (z - s / 2),
    "squared hinge": lambda z, s: -2 * s * np.maximum(0, 1 - s * z),
}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": cross_entropy,
    "squared error": lambda z, y: ((z - (y - 0.5)) ** 2).sum(),
    "squared hinge": lambda z, y: (torch.relu(1 - (2 * y - 1) * z) ** 2).sum(),
}


def outputs(weights: Weights, x: Array) -> Array:
    """Outputs of the deep linear network, (N,)."""
    for w in weights:
        x = x @ w.T
    return np.asarray(x[:, 0])


def gradients(weights: Weights, x: Array, slope: Array) -> Weights:
    """Of every matrix, from the derivative (N,) with respect to the outputs."""
    inputs = [x]
    for w in weights[:-1]:
        inputs.append(inputs[-1] @ w.T)
    back, result = slope[:, None], []
    for w, signal in zip(reversed(weights), reversed(inputs)):
        result.append(back.T @ signal)
        back = back @ w
    return result[::-1]


def descend(weights: Weights, x: Array, s: Array, settings: Mapping[str, Any]) -> Weights:
    """One step of gradient descent with weight decay."""
    result = gradients(weights, x, SLOPES[settings["loss"]](outputs(weights, x), s))
    lr, decay = settings["lr"], settings["decay"]
    return [w - lr * (g + 2 * decay * w) for w, g in zip(weights, result)]


def grow(weights: Weights, x: Array, s: Array) -> Weights:
    """One step against the gradient of cross-entropy, of length STRIDE times the norm of all weights."""
    margins = s * outputs(weights, x)
    # A common factor of all slopes does not matter: exp(smallest margin) keeps them from vanishing.
    slope = -s * np.exp(max(0.0, float(margins.min())) - np.logaddexp(0, margins))
    result = gradients(weights, x, slope)
    length = STRIDE * _norm(weights) / _norm(result)
    return [w - length * g for w, g in zip(weights, result)]


def _norm(weights: Weights) -> float:
    return float(np.sqrt(sum(float((p**2).sum()) for p in weights)))


def bound_of(weights: Weights, x: Array, y: Array, settings: Mapping[str, Any]) -> Array:
    """Upper bound on σ₂/σ₁ by layer (L,): ‖G_k‖/2μσ₁ with decay, from the differences of layers without."""
    if settings["decay"]:
        result = decay_rank(weights, settings["decay"], x, y, LOSSES[settings["loss"]])
        first = np.asarray(result.terms["first"])
        return np.where(first > GONE, np.asarray(result.terms["value by layer"]) / np.maximum(first, GONE), 0.0)
    return np.asarray(cross_entropy_rank(weights, x, y).terms["value by layer"])


def compute(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Computes the numbers of one variant and seed."""
    x, y, weights = data_and_weights(seed, settings)
    s, steps, start = 2 * y - 1, settings["steps"], _norm(weights)
    measured_steps = {0, *np.unique(np.geomspace(1, steps, MEASUREMENTS).round()).astype(int).tolist()}
    curve, passed = [], 0
    for step in range(steps + 1):
        if step in measured_steps:
            sizes = [np.linalg.svd(w, compute_uv=False) for w in weights[:-1]]  # the last matrix is one row
            ratios = np.array([float(v[1] / v[0]) if v[0] > GONE else 0.0 for v in sizes])
            bounds = bound_of(weights, x, y, settings)[:-1]
            passed += int((ratios > bounds + 1e-12).sum())  # 1e-12: rounding of the singular values
            curve.append((step, ratios.tolist(), float(bounds.max())))
            on_progress(step / steps)
        if step < steps:
            weights = grow(weights, x, s) if settings.get("growing") else descend(weights, x, s, settings)
    first = [float(v[0]) if v[0] > GONE else 0.0 for v in sizes]
    ranks = [int((v > 1e-3 * max(1.0, *first)).sum()) for v in sizes]
    values = {
        "ratio": float(ratios.max()),
        "bound": curve[-1][2],
        "passed": float(passed),
        "first": min(first),
        "rank": float(max(ranks)),
        "alignment": float(alignment(weights).min()),
        "grown": _norm(weights) / start,
        "right": float((outputs(weights, x) * s > 0).mean()),
    }
    return Outcome(values, {"curve": curve})


_FOUR = "each weight matrix W̄_k has rank 1, almost surely"
_FIVE = (
    "If the weight matrices converge in direction to (W̄_1, …, W̄_L) from a random initialization, then each W̄_k has rank 1 almost "
    "surely."
)


def claims(scale: RankScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    four, five = (f"Persistency of excitation, Theorem {k}" for k in (4, 5))
    ratio = "largest σ₂/σ₁ of a layer"

    def one_direction(text: str, source: str, variant: str) -> Claim:
        return Claim(text, source, f"{variant}: {ratio}", (variant,), lambda n: n[variant].ratio, below=RANK_ONE)

    def never_passed(text: str, variant: str) -> Claim:
        measure = (
            f"{variant}: number of times a layer exceeds its bound, of about {MEASUREMENTS} measurements of every layer"
        )
        return Claim(
            text, "excite.bounds", measure, (variant,), lambda n: n[variant].passed, below=0.5, kind="universal"
        )

    return [
        *(one_direction(f"weight decay makes every layer one direction, {loss}", four, variant).quoting(_FOUR, "threshold")
          for loss, variant in DECAY.items()),
        Claim(
            "every layer then has rank 1, however strong the decay",
            four,
            f"{STRONG}: largest rank of a layer",
            (STRONG,),
            lambda n: n[STRONG].rank,
            above=0.5,
            kind="universal",
        ).quoting(_FOUR),
        never_passed("on the way σ₂ is at most ‖gradient‖ / 2μ", DECAY["cross-entropy"]),
        one_direction("cross-entropy alone makes every layer one direction, in the limit", five, GROWING).quoting(_FIVE, "threshold"),
        never_passed("on the way σ₂ is bounded by the differences W_k W_k' − W_{k+1}' W_{k+1}", GROWING),
        one_direction(f"{scale.steps:,} steps of gradient descent come near that limit", f"after {five}", DESCENT).quoting(_FIVE, "ours"),
        one_direction("they do if the initial weights are small", f"after {five}", SMALL).quoting(_FIVE, "ours"),
        one_direction(
            "gradient descent induces signals of low rank, without cross-entropy or decay too",
            "Persistency of excitation, section 4, item 2, read beyond its theorems",
            PLAIN,
        ).quoting(
            "the use of the gradient descent algorithm for training multiple-layer networks induces low-rank signals in the intermediate "
            "layers of the network",
            "threshold",
        ),
    ]  # fmt: skip


_LOWEST = 1e-5


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Draws the figures of the study."""
    from matplotlib.figure import Figure

    columns = min(4, len(details))
    rows = -(-len(details) // columns)
    figure = Figure(figsize=(1 + 2.9 * columns, 1 + 3 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axis in axes.flat[len(details) :]:
        axis.axis("off")
    for axis, (variant, seeds) in zip(axes.flat, details.items()):
        curve = seeds[0]["curve"]
        steps = [step for step, _, _ in curve]
        for layer in range(len(curve[0][1])):
            ratios = [result[layer] or math.nan for _, result, _ in curve]
            axis.plot(steps, ratios, color=COLOURS[2 + layer % 5], linewidth=1.8, label=f"layer {layer + 1}")
        bounds = [bound or math.nan for _, _, bound in curve]
        axis.plot(steps, bounds, color=COLOURS[0], linestyle="--", linewidth=1.4, label="bound on all")
        axis.set(yscale="log", ylim=(_LOWEST, 30), xlim=(1, steps[-1]))
        axis.set_xscale("symlog", linthresh=1)
        axis.set_title(variant, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("σ₂/σ₁ (one direction: 0)")
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.legend(
        *axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=9, frameon=False
    )
    figure.suptitle(study.title, fontsize=13)
    return {"figure": (f"{study.title}: second over first singular value", figure)}


STUDY = Study(
    "linear-rank",
    "Layers of deep linear networks become one direction",
    "Theorems 4 and 5 of Persistency of Excitation for Robustness of Neural Networks",
    "Two classes that a hyperplane through the origin separates",
    Computed(
        compute,
        {
            "ratio": ("largest σ₂/σ₁", "{:.2g}"),
            "bound": ("its bound", "{:.2g}"),
            "first": ("smallest σ₁", "{:.2g}"),
            "rank": ("largest rank", "{:.0f}"),
            "alignment": ("smallest alignment", "{:.3f}"),
            "grown": ("weights grown by", "{:.2g}"),
            "right": ("classified correctly", "{:.0%}"),
        },
        draw,
        "Each line is a layer of the first seed: its second singular value over its first, zero where the layer has rank one. The dashed line is the theoretical bound for the worst layer\n"
        "at that step, from its gradient or from adjacent layers.\n"
        "With strong decay the lines end where the weights vanish.",
        "Means over seeds, with the range, over all layers but the last, which is one row. The rank counts singular values above\n"
        "0.001, or 0.001 times the largest if that is more than one. *Alignment* is |u·v| of the leading singular vectors of\n"
        "adjacent layers.",
        (
            "Sums over points; learning rate 0.002, μ = 0.1, strong decay μ = 10, float64. Initial weights have variance 1 / inputs.",
        ),
    ),
    SCALES,
    variants,
    claims,
    (
        "The paper has no experiment on these theorems: sizes and steps are ours at both scales.",
        "Theorem 5 is on gradient flow. Growing steps follow it at first; later they swing between support vectors, and the "
        "differences of layers, which the flow conserves, drift: the bound is taken at the weights as they are, and counts that.",
        "With strong decay all weights vanish: the rank is 0.",
    ),
    asks="are linear layers of rank 1?",
    seconds={"quick": 16, "paper": 550},
    sources=(
        "persistency:Theorem 4",
        "persistency:Theorem 5",
    ),
)
