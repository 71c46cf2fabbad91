"""Bounds of Corollaries 1 and 3 and of Theorem 2 by depth, over training, and by speed of updates: what the paper says about them in words.

The task of `frequency` (a product of cosines of two coordinates, in ten dimensions), learned point by point by networks of 2 to 6 layers. For
a network f with first bias b, the normalized update at a point is ‖∂f/∂b‖: φ is the largest at a training point, β = σ₁(W₁).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from excite._core.randomness import seeded_weights
from excite.bounds import empty_region
from excite.data import load
from excite.studies.computed import Computed, OnProgress, Outcome, StepsScale
from excite.studies.figures import COLOURS
from excite.studies.study import Claim, Study, Variant, VariantResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEPTHS, OMEGAS, MIDDLE = (2, 3, 4, 6), (0.25, 0.5, 1.0), 3
BY_DEPTH = tuple(f"{depth} layers, ω = 0.5" for depth in DEPTHS)
BY_OMEGA = tuple(f"{MIDDLE} layers, ω = {omega}" for omega in OMEGAS)
FACTOR = 2.0  # "does not generally depend on depth": from one depth to any other βφ changes by less than this
PORTION = (
    2.0  # bounds up to this count as bounded complexity: |∇f| of the target is at most 2πω/√2, about 2.2 for ω = 0.5
)
_WIDTH, _POINTS, _NEW, _EVERY = 12, 100, 200, 20
_PAPER = "What training reveals"
_TIGHTER = (
    "the bound of Corollary 1 can be exponentially tighter than the product-of-norms bound: whereas βφ does not generally depend on depth, "
    "λ_prod = w^d when ‖W_l‖ = w"
)
_EARLY = (
    "the distance of the trained network to initialization is small if the learned NN has a low complexity (near training data) throughout "
    "its training, with the first few high-error epochs playing a dominant role"
)
_SLOWER = "NNs whose parameters are updated more slowly during training have bounded complexity in a larger portion of the input space"

SCALES = {
    "quick": StepsScale(name="quick", seeds=4, steps=8_000, words="80 epochs of 100 points, 4 seeds"),
    "paper": StepsScale(
        name="paper", seeds=10, steps=20_000, words="200 epochs of 100 points, 10 seeds; the paper has no experiment"
    ),
}


def variants(scale: StepsScale) -> list[Variant]:
    """Depths at one frequency, and frequencies at one depth."""
    base = {"steps": scale.steps, "lr": 0.02}
    settings = {name: {**base, "depth": depth, "omega": 0.5} for name, depth in zip(BY_DEPTH, DEPTHS)}
    settings |= {name: {**base, "depth": MIDDLE, "omega": omega} for name, omega in zip(BY_OMEGA, OMEGAS)}
    return [Variant(name, config) for name, config in settings.items()]


def network(inputs: int, depth: int, seed: int) -> nn.Sequential:
    """A ReLU network of `depth` linear layers with one output, PyTorch's initialization, in float64."""
    widths = [inputs, *[_WIDTH] * (depth - 1), 1]
    with seeded_weights(seed):
        layers = [layer for n, m in pairwise(widths) for layer in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).double()


def sizes(model: nn.Sequential, x: Tensor) -> tuple[Tensor, Tensor]:
    """‖∂f/∂b‖ of the first bias and ‖∂f/∂x‖ at every point (N, n)."""
    first = model[0]
    assert isinstance(first, nn.Linear)
    hidden = first(x).detach().requires_grad_(True)
    (by_bias,) = torch.autograd.grad(model[1:](hidden).sum(), hidden)
    return by_bias.norm(dim=1), (by_bias @ first.weight.detach()).norm(dim=1)


def train(
    model: nn.Sequential, x: Tensor, y: Tensor, lr: float, steps: int, seed: int, on_progress: OnProgress
) -> tuple[Tensor, Tensor]:
    """SGD on ½(f − y)², one point per step; for every step ‖Δb‖ and its bound of Corollary 3, α |f − y| λ / σ_n(W₁)."""
    first, weights = model[0], list(model.parameters())
    assert isinstance(first, nn.Linear)
    order = torch.Generator().manual_seed(seed)
    moved, bound, smallest = torch.zeros(steps), torch.zeros(steps), 0.0
    for step in range(steps):
        if step % len(x) == 0:
            samples = torch.randperm(len(x), generator=order)
        at = samples[step % len(x)]
        error = model(x[at]) - y[at]
        gradients = torch.autograd.grad(error.square().sum() / 2, weights)
        if step % _EVERY == 0:
            smallest = float(torch.linalg.svdvals(first.weight.detach())[-1])
            on_progress(step / steps)
        moved[step] = lr * gradients[1].norm()
        bound[step] = lr * (gradients[1] @ first.weight.detach()).norm() / smallest
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients):
                weight.sub_(lr * gradient)
    return moved, bound


def compute(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Trains a network and computes the bounds."""
    data = load("frequencies", train=_POINTS, test=_NEW, seed=seed, omega=settings["omega"])
    x, y, new = (tensor.double() for tensor in (data.x_train, data.y_train.reshape(-1, 1), data.x_test))
    model = network(x.shape[1], settings["depth"], seed)
    moved, bound = train(model, x, y, settings["lr"], settings["steps"], seed, on_progress)
    updates, slopes = sizes(model, x)
    norms = [
        float(torch.linalg.matrix_norm(layer.weight.detach(), 2)) for layer in model if isinstance(layer, nn.Linear)
    ]
    far = empty_region(model, x, None, new).values if settings["depth"] == MIDDLE else torch.full((1,), math.nan)
    tenth = settings["steps"] // 10
    values = {
        "corollary1": norms[0] * float(updates.max()),
        "product": math.prod(norms),
        "slope": float(slopes.max()),
        "early": float(bound[:tenth].sum() / bound.sum()),
        "early_moved": float(moved[:tenth].sum() / moved.sum()),
        "speed": float(moved[-tenth:].mean()) / settings["lr"],
        "portion": math.nan if far.isnan().all() else float((far <= PORTION).double().mean()),
        "loss": float((model(x) - y).square().mean().detach()) / 2,
    }
    return Outcome(values, {name: values[name] for name in ("corollary1", "product", "slope")})


def _log(result: VariantResult, above: str, below: str) -> float:
    return math.log10(getattr(result, above) / getattr(result, below))


def claims(scale: StepsScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    first, last = BY_DEPTH[0], BY_DEPTH[-1]
    every = tuple(dict.fromkeys((*BY_DEPTH, *BY_OMEGA)))
    return [
        Claim(
            "the product of norms exceeds the bound of Corollary 1 by a factor that grows with every depth", f"{_PAPER}, Corollary 1",
            "log10 of product over βφ, from one depth to the next", BY_DEPTH,
            lambda n: [_log(n[b], "product", "corollary1") - _log(n[a], "product", "corollary1") for a, b in pairwise(BY_DEPTH)], above=0.0,
        ).quoting(_TIGHTER, "weaker"),
        Claim(
            f"βφ does not depend on depth: from {DEPTHS[0]} to {DEPTHS[-1]} layers it changes by less than a factor of {FACTOR:g}", f"{_PAPER}, Corollary 1",
            f"log10 of βφ, {DEPTHS[-1]} layers over {DEPTHS[0]}", (first, last),
            lambda n: math.log10(n[last].corollary1 / n[first].corollary1), within=math.log10(FACTOR),
        ).quoting(_TIGHTER, "threshold"),
        Claim(
            "Corollary 1 holds: no slope at a training point exceeds βφ", f"{_PAPER}, Corollary 1", "largest slope at a training point over βφ", every,
            lambda n: max(n[name].slope / n[name].corollary1 for name in every), below=1 + 1e-9, kind="universal",
        ).quoting("the Lipschitz constant of f^(t) […] is bounded by"),
        *(
            Claim(
                f"the first tenth of training makes up more than half of {description}, {name}", f"{_PAPER}, section 1 and Corollary 3",
                f"{name}: share of the first tenth of the steps", (name,), lambda n, name=name, number=number: getattr(n[name], number), above=0.5,  # type: ignore[misc]
            ).quoting(_EARLY, "threshold")
            for number, description in (("early", "the bound of Corollary 3"), ("early_moved", "the way of the bias"))
            for name in BY_OMEGA
        ),
        Claim(
            "the faster a network's bias still moves, the smaller the portion of new points at which Theorem 2 bounds its slope", f"{_PAPER}, section 1 and Theorem 2",
            f"fraction of new points with a bound of at most {PORTION:g}, from one frequency to the next higher", BY_OMEGA,
            lambda n: [n[b].portion - n[a].portion for a, b in pairwise(BY_OMEGA)], below=0.0,
            premise=lambda n: all(n[b].speed > n[a].speed for a, b in pairwise(BY_OMEGA)),
        ).quoting(_SLOWER, "threshold"),
    ]  # fmt: skip


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """The bounds by depth; the fraction of the first tenth and the bounded portion by frequency."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, label, colour in (("product", "product of norms", COLOURS[2]), ("corollary1", "βφ, Corollary 1", COLOURS[1]), ("slope", "largest slope at a training point", COLOURS[0])):  # fmt: skip
        for depth, variant in zip(DEPTHS, BY_DEPTH):
            values = [seed[name] for seed in details.get(variant, [])]
            left.plot(
                [depth] * len(values),
                values,
                "o",
                color=colour,
                alpha=0.6,
                markersize=5,
                label=label if depth == DEPTHS[0] else None,
            )
    left.set(yscale="log", xlabel="layers", ylabel="Lipschitz constant near training points", xticks=DEPTHS)
    left.legend(fontsize=9)
    for name, label, colour in (("early", "first tenth's share of the bound of Corollary 3", COLOURS[3]), ("portion", f"new points with a bound ≤ {PORTION:g}", COLOURS[0])):  # fmt: skip
        for omega, variant in zip(OMEGAS, BY_OMEGA):
            values = [getattr(result, name) for result in numbers if result.variant == variant]
            right.plot(
                [omega] * len(values),
                values,
                "o",
                color=colour,
                alpha=0.6,
                markersize=5,
                label=label if omega == OMEGAS[0] else None,
            )
    right.set(xlabel="frequency ω", ylabel="fraction", ylim=(-0.03, 1.03), xticks=OMEGAS)
    right.legend(fontsize=9)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.suptitle(study.title, fontsize=12)
    return {"figure": (f"{study.title}: bounds by depth, and shares by frequency", figure)}


STUDY = Study(
    "depth",
    "Bounds from the trajectory, by depth and over training",
    "what What Training Reveals about Neural Network Complexity says in words about Corollaries 1 and 3 and Theorem 2 (it has no figure of it)",
    "cos(2πω z₁) cos(2πω z₂) in ten dimensions, ReLU networks of 2 to 6 layers",
    Computed(
        compute,
        {
            "corollary1": ("βφ", "{:.2f}"),
            "product": ("product of norms", "{:.3g}"),
            "slope": ("largest slope", "{:.2f}"),
            "early": ("first tenth, bound", "{:.0%}"),
            "early_moved": ("first tenth, way", "{:.0%}"),
            "speed": ("updates at the end", "{:.3f}"),
            "portion": ("bounded portion", "{:.0%}"),
            "loss": ("training loss", "{:.4f}"),
        },
        draw,
        "Left: a mark per seed; βφ is the bound of Corollary 1 for a network at rest. Right: how much of the bound of Corollary 3 the first tenth\n"
        "of the steps makes up, and at which fraction of new points Theorem 2 gives a small bound.",
        f"Means over seeds, with the range. *First tenth*: its fraction of Σ α|f − y|λ/σ_n(W₁), and of Σ‖Δb‖, over all steps. *Updates at the end*: the\n"
        f"mean ‖Δb‖/α of the last tenth. *Bounded portion*: new points at which Theorem 2 gives a bound of at most {PORTION:g}; {MIDDLE} layers only.",
        (f"SGD, one point per step, learning rate 0.02, ½(f − y)², float64; hidden layers of {_WIDTH} units.",),
    ),
    SCALES,
    variants,
    claims,
    (
        "β and φ are those of the trained network, not the largest over an interval of training: the most favourable case for the bound.",
        "σ_n(W₁) is taken as printed; for a first layer wider than the input Corollary 3 needs that of the active rows (see [Theory](../theory/reveals.md)), which is smaller.",
    ),
    asks="bounds by depth and time",
    seconds={"quick": 66},
    sources=("reveals:Corollary 1", "reveals:Corollary 3", "reveals:Theorem 2"),
)  # fmt: skip
