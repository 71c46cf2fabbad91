"""Consequences of hyperparameters, predicted in advance: rotation per step, rank of weights, lazy or rich training.

Three predictions from the literature after the papers, each on a grid of small training runs:

- rotation per step of normalized layers at equilibrium, √(2ηλ(1−β₁)/(1+β₁)) for AdamW and √(2ηλ/(1+α)) for SGD with momentum α (Kosson,
  Messmer, Jaggi 2024);
- rank of a weight matrix trained by SGD with batches of B and decay: within ε (relative to its spectral norm) of one of rank
  B·log(2/ε)/(ηλ) (Galanti, Siegel, Gupte, Poggio 2025, with λ as in PyTorch's weight_decay);
- how far the kernel of f(x) = a·w'x moves, from the conserved imbalance δ = a² − ‖w‖² (Kunin et al. 2024): large and positive is lazy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor

from excite.probes.consequences import expected_rotation, rank_bound
from excite.studies.computed import Computed, OnProgress, Outcome, StepsScale
from excite.studies.study import Claim, Study, Variant, VariantResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROTATION, RANK, IMBALANCE = "rotation", "rank", "imbalance"
SOURCES = {
    ROTATION: "Kosson, Messmer, Jaggi 2024, Rotational Equilibrium (arXiv 2305.17212)",
    RANK: "Galanti, Siegel, Gupte, Poggio 2025, SGD and Weight Decay Secretly Minimize the Rank (arXiv 2206.05794)",
    IMBALANCE: "Kunin et al. 2024, Get Rich Quick (arXiv 2406.06158)",
}
_BETAS, _MOMENTUM = (0.9, 0.99), 0.9
EPSILON = 0.1  # how near the low-rank matrix is, relative to the spectral norm
_SGD = {"momentum": _MOMENTUM, "dampening": 0.0}
_WIDTH, _CLASSES = 32, 8

SCALES = {
    "quick": StepsScale(name="quick", seeds=5, steps=4000, words="4,000 steps, five seeds"),
    "paper": StepsScale(name="paper", seeds=20, steps=10_000, words="10,000 steps, twenty seeds"),
}


def variants(scale: StepsScale) -> list[Variant]:
    """The three predictions."""
    return [Variant(name, {"part": name, "steps": scale.steps}) for name in (ROTATION, RANK, IMBALANCE)]


def predicted_rotation(optimizer: str, rate: float, decay: float) -> float:
    """Angle per step at equilibrium, in radians.

    A gradient adds η²E‖u‖² to ‖w‖² in all, decay takes 2ηλ‖w‖²; what one step moves is smaller by what momentum averages out.
    """
    own = {"betas": _BETAS, "decoupled_weight_decay": True} if optimizer == "adamw" else _SGD
    angle = expected_rotation({"lr": rate, "weight_decay": decay, **own})
    assert angle is not None
    return angle


def compute(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """One prediction on its grid."""
    experiments: dict[str, Callable[[int, int], Outcome]] = {ROTATION: rotation, RANK: rank, IMBALANCE: imbalance}
    return experiments[settings["part"]](settings["steps"], seed)


def normalized_network(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    """Logits (S, B, classes) of S networks whose layers are each followed by a normalization without parameters."""
    h = x
    for weight in weights:
        h = F.layer_norm((h.relu() if weight is not weights[0] else h) @ weight.mT, weight.shape[1:2])
    return 3 * h


def stacked_gradients(weights: Sequence[Tensor], teacher: Tensor, use: Tensor, drawn: torch.Generator) -> list[Tensor]:
    """Gradients of each network's own mean loss on a fresh batch; `use` (S, B) has the weight of each sample."""
    x = torch.randn(*use.shape, weights[0].shape[2], generator=drawn)
    y = (x @ teacher + torch.randn(*use.shape, _CLASSES, generator=drawn)).argmax(2)
    leaves = [weight.requires_grad_() for weight in weights]
    losses = F.cross_entropy(normalized_network(leaves, x).flatten(0, 1), y.flatten(), reduction="none").reshape(
        use.shape
    )
    gradients = torch.autograd.grad((losses * use).sum(), leaves)
    for weight in weights:
        weight.requires_grad_(False)
    return list(gradients)


def _start(seed: int, count: int) -> tuple[list[Tensor], Tensor, torch.Generator]:
    drawn = torch.Generator().manual_seed(seed)
    shapes = [(_WIDTH, 16), (_WIDTH, _WIDTH), (_CLASSES, _WIDTH)]
    weights = [(torch.randn(shape, generator=drawn) / shape[1] ** 0.5).repeat(count, 1, 1) for shape in shapes]
    return weights, torch.randn(16, _CLASSES, generator=drawn), drawn


def rotation(steps: int, seed: int) -> Outcome:
    """Measured over predicted angle per step of the hidden layer, AdamW and SGD with momentum."""
    grid = [("adamw", rate, decay) for rate in (3e-3, 1e-2) for decay in (0.3, 1.0, 3.0)]
    grid += [("sgd", rate, decay) for rate in (0.03, 0.1) for decay in (0.03, 0.1, 0.3)]
    weights, teacher, drawn = _start(seed, len(grid))
    rate, decay = (torch.tensor([setting[i] for setting in grid])[:, None, None] for i in (1, 2))
    adam = torch.tensor([setting[0] == "adamw" for setting in grid])[:, None, None]
    use = torch.full((len(grid), 8), 1 / 8)
    first, second, buffer = ([torch.zeros_like(w) for w in weights] for _ in range(3))
    angles: list[Tensor] = []
    for step in range(1, steps + 1):
        for i, g in enumerate(stacked_gradients(weights, teacher, use, drawn)):
            first[i].lerp_(g, 1 - _BETAS[0])
            second[i].lerp_(g.square(), 1 - _BETAS[1])
            buffer[i].mul_(_MOMENTUM).add_(g + decay * weights[i])
            unbiased = first[i] / (1 - _BETAS[0] ** step) / ((second[i] / (1 - _BETAS[1] ** step)).sqrt() + 1e-12)
            after = torch.where(adam, weights[i] * (1 - rate * decay) - rate * unbiased, weights[i] - rate * buffer[i])
            if i == 1 and step > steps // 2:
                cosine = F.cosine_similarity(weights[i].flatten(1).double(), after.flatten(1).double(), dim=1)
                angles.append(cosine.clamp(-1, 1).arccos().square())
            weights[i] = after
    measured = torch.stack(angles).mean(0).sqrt().tolist()
    points = [[setting[0], predicted_rotation(*setting), value] for setting, value in zip(grid, measured)]
    errors = {
        name: [abs(math.log2(m / p)) for optimizer, p, m in points if optimizer == name] for name in ("adamw", "sgd")
    }
    order = stats.spearmanr([p for _, p, _ in points], [m for _, _, m in points]).statistic
    return Outcome(
        {**{f"error_{name}": float(np.mean(value)) for name, value in errors.items()}, "order": float(order)}, points
    )


def rank(steps: int, seed: int) -> Outcome:
    """Singular values of the hidden layer above ε of the largest, every 50 steps of the second half, against the bound."""
    grid = [(batch, product) for batch in (1, 2, 4) for product in (0.02, 0.06, 0.2)]
    weights, teacher, drawn = _start(seed, len(grid))
    use = torch.tensor([[1 / batch if i < batch else 0.0 for i in range(4)] for batch, _ in grid])
    rate = 0.2
    decay = torch.tensor([product / rate for _, product in grid])[:, None, None]
    rows = []
    for step in range(1, steps + 1):
        gradients = stacked_gradients(weights, teacher, use, drawn)
        weights = [w * (1 - rate * decay) - rate * g for w, g in zip(weights, gradients)]
        if step > steps // 2 and step % 50 == 0:
            sizes = torch.linalg.svdvals(weights[1].double())
            rows.append((sizes > EPSILON * sizes[:, :1]).sum(1))
    counts = torch.stack(rows).double().mean(0).tolist()
    largest = torch.stack(rows).amax(0).tolist()
    points = [
        [batch / product, rank_bound(batch, 1.0, product, EPSILON), count]
        for (batch, product), count in zip(grid, counts)
    ]
    order = stats.spearmanr([at for at, _, _ in points], counts).statistic
    return Outcome(
        {"order": float(order), "worst": max(angle / bound for angle, (_, bound, _) in zip(largest, points))}, points
    )


def imbalance(steps: int, seed: int) -> Outcome:
    """How far the kernel of f(x) = a·w'x turns while it fits a linear function, by δ = a² − ‖w‖²."""
    drawn = torch.Generator().manual_seed(seed)
    deltas = torch.tensor([-4.0, -1.0, -0.25, 0.0, 0.25, 1.0, 4.0], dtype=torch.float64)
    x = torch.linalg.qr(torch.randn(20, 8, generator=drawn, dtype=torch.float64))[0] * 20**0.5  # whitened
    target, unit = (F.normalize(torch.randn(8, generator=drawn, dtype=torch.float64), dim=0) for _ in range(2))
    size = 0.3  # a‖w‖ at the start, the same for all
    a = ((deltas + (deltas.square() + 4 * size**2).sqrt()) / 2).sqrt()
    w = (size / a)[:, None] * unit
    begin = _kernel(a, w, x)
    for _ in range(4 * steps):
        error = (a[:, None] * w) @ x.T - target @ x.T
        slope = error @ x / len(x)
        a, w = a - 0.01 * (slope * w).sum(1), w - 0.01 * a[:, None] * slope
    end = _kernel(a, w, x)
    moved = 1 - (begin * end).sum((1, 2)) / (begin.norm(dim=(1, 2)) * end.norm(dim=(1, 2)))
    drift = float((a.square() - w.square().sum(1) - deltas).abs().max())
    points = [[float(delta), float(value)] for delta, value in zip(deltas, moved)]
    order = stats.spearmanr(deltas.numpy(), moved.numpy()).statistic
    return Outcome({"order": float(order), "drift": drift, "loss": float(error.square().mean(1).max())}, points)


def _kernel(a: Tensor, w: Tensor, x: Tensor) -> Tensor:
    """The neural tangent kernel a²XX' + Xw(Xw)', (S, n, n)."""
    projections = w @ x.T
    return a.square()[:, None, None] * (x @ x.T) + projections[:, :, None] * projections[:, None, :]


def _rotation_error(optimizer: str, n: Mapping[str, VariantResult]) -> float:
    return n[ROTATION].values[f"error_{optimizer}"]


def claims(scale: StepsScale) -> list[Claim]:
    """Sentences and the numbers that decide them."""
    return [
        *(
            Claim(
                f"{label}: the rotation per step is within 15 % of the predicted one", SOURCES[ROTATION],
                "mean absolute value of log2 of measured over predicted angle per step, over the grid", (ROTATION,),
                partial(_rotation_error, name), below=0.2,
            )
            for label, name in (("AdamW", "adamw"), ("SGD with momentum", "sgd"))
        ),
        Claim(
            "the rotation per step follows the prediction over rates, decays and optimizers", SOURCES[ROTATION],
            "rank correlation of measured and predicted angle", (ROTATION,), lambda n: n[ROTATION].order, above=0.9,
        ),
        Claim(
            "no weight matrix has a higher rank than the bound allows", SOURCES[RANK],
            "largest ratio of singular values above ε to the bound", (RANK,), lambda n: n[RANK].worst, below=1.0, kind="universal",
        ),
        Claim(
            "rank grows with batch/(rate·decay)", SOURCES[RANK], "rank correlation of the two over the grid", (RANK,),
            lambda n: n[RANK].order, above=0.8,
        ),
        Claim(
            "the larger the conserved imbalance a² − ‖w‖², the less the kernel turns", SOURCES[IMBALANCE],
            "rank correlation of imbalance and turn of the kernel", (IMBALANCE,), lambda n: n[IMBALANCE].order, below=-0.8,
        ),
    ]  # fmt: skip


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Measured against predicted, one panel per prediction."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for optimizer, colour, marker in (("adamw", "#d95f02", "o"), ("sgd", "#1b9e77", "s")):
        at = np.array([[p, m] for seed in details[ROTATION] for name, p, m in seed if name == optimizer])
        left.plot(
            *at.T, marker, color=colour, label={"adamw": "AdamW", "sgd": "SGD, momentum 0.9"}[optimizer], alpha=0.7
        )
    ends = np.array([p for seed in details[ROTATION] for _, p, _ in seed])
    left.plot([ends.min(), ends.max()], [ends.min(), ends.max()], color="black", linewidth=0.8)
    left.set(
        xscale="log",
        yscale="log",
        xlabel="predicted angle per step",
        ylabel="measured",
        title="Rotation (Kosson et al.)",
    )
    left.legend(fontsize=8)
    at = np.array([point for seed in details[RANK] for point in seed])
    middle.plot(at[:, 0], at[:, 2], "o", color="#7570b3", alpha=0.6)
    order = np.argsort(at[:, 0])
    middle.plot(
        at[order, 0], np.minimum(at[order, 1], _WIDTH), color="black", linewidth=0.8, label=f"bound, at most {_WIDTH}"
    )
    middle.set(
        xscale="log",
        xlabel="batch / (rate · decay)",
        ylabel=f"singular values above {EPSILON:g} of the largest",
        title="Rank (Galanti et al.)",
    )
    middle.legend(fontsize=8)
    at = np.array([point for seed in details[IMBALANCE] for point in seed])
    right.plot(*at.T, "o", color="#e7298a", alpha=0.6)
    right.set(
        xscale="symlog",
        xlabel="conserved imbalance a² − ‖w‖²",
        ylabel="turn of the kernel (1 − cosine)",
        title="Lazy or rich (Kunin et al.)",
    )
    for axis in (left, middle, right):
        axis.grid(alpha=0.3)
    return {"figure": (f"{study.title}: measured against predicted, one dot per training", figure)}


STUDY = Study(
    "consequences",
    "What hyperparameters decide in advance",
    "no figure of the papers",
    "Small training runs on grids of rate, decay, batch and initial imbalance",
    Computed(
        compute,
        {
            "error_adamw": ("AdamW, absolute log2 of ratio", "{:.3f}"), "error_sgd": ("SGD, absolute log2 of ratio", "{:.3f}"), "order": ("rank correlation", "{:.2f}"),
            "worst": ("largest fraction of the bound", "{:.2f}"), "drift": ("drift of the imbalance", "{:.1e}"), "loss": ("last loss", "{:.1e}"),
        },
        draw,
        "One dot per training. Left: root mean square of the angle between the hidden layer's weights before and after a step, second half of the training.\n"
        "Middle: singular values of the hidden layer above a tenth of the largest, mean over the second half. Right: turn of the tangent kernel from the first step to the last.",
        "Means over seeds, with the range.",
        (
            "Rotation and rank: networks 16-32-32-8, a normalization without parameters after every layer, cross-entropy on labels of a noisy linear teacher, fresh batches (of 8; 1 to 4 for the rank).",
            "Imbalance: f(x) = a·w'x, eight whitened inputs, gradient descent at rate 0.01, a‖w‖ = 0.3 at the start.",
        ),
    ),
    SCALES,
    variants,
    claims,
    ("The rank's bound assumes that the norm of the weights has converged, and is above the width on part of the grid, where it is vacuous. After one pilot training of 600 steps the rank is averaged over the second half instead of read at the last step.",),
    asks="what rate and decay decide",
    seconds={"quick": 60},
)  # fmt: skip
