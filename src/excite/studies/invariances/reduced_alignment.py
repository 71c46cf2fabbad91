"""Convolutions and residual blocks with free skips against the bound of Theorem 2 of Training invariances.

Bias-free networks with one output, in float64, on points that a hyperplane through the origin separates, trained on the
exponential loss by steps along the gradient that are a thousandth of the weights' norm long: they follow gradient flow's
path to large norms. The paper has no experiment of its own on this: sizes, data and steps are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from excite.bounds import Bound, reduced_alignment
from excite.studies.computed import Computed, OnProgress, Outcome, StepsScale
from excite.studies.figures import COLOURS
from excite.studies.study import Claim, Study, Variant, VariantResult
from excite.wiring import trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


STRIDE = 1e-3
MEASUREMENTS = 30
CONV = {kind: f"convolutions, {kind}" for kind in ("linear", "ReLU")}
FREE = {kind: f"residual blocks, {kind}" for kind in ("linear", "ReLU")}
DENSE = {kind: f"fully connected, {kind}" for kind in ("linear", "ReLU")}

SCALES = {
    "quick": StepsScale(name="quick", seeds=3, steps=2_000, words="2,000 steps, 3 seeds"),
    "paper": StepsScale(name="paper", seeds=5, steps=4_000, words="4,000 steps, 5 seeds"),
}


def variants(scale: StepsScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    return [
        Variant(names[activation], {"steps": scale.steps, "blocks": blocks, "relu": activation == "ReLU"})
        for blocks, names in (("convolutions", CONV), ("residual", FREE), ("dense", DENSE))
        for activation in ("linear", "ReLU")
    ]


class Free(nn.Module):
    """σ(U σ(Y x) + Z x), x and the result of size n."""

    def __init__(self, n: int, act: nn.Module):
        super().__init__()
        self.y, self.u, self.z = (nn.Linear(n, n, bias=False) for _ in range(3))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """Applies the module."""
        out: Tensor = self.act(self.u(self.act(self.y(x))) + self.z(x))
        return out


def network(blocks: str, relu: bool) -> nn.Sequential:
    """Builds the network of a variant."""
    act: nn.Module = nn.ReLU() if relu else nn.Identity()
    if blocks == "convolutions":  # inputs (2, 8)
        layers = [nn.Conv1d(2, 4, 3, bias=False), act, nn.Conv1d(4, 4, 3, bias=False), act, nn.Flatten(),
                  nn.Linear(16, 6, bias=False), act, nn.Linear(6, 1, bias=False)]  # fmt: skip
    elif blocks == "residual":  # inputs (8,)
        layers = [nn.Linear(8, 6, bias=False), act, Free(6, act), Free(6, act), nn.Linear(6, 1, bias=False)]
    else:
        layers = [nn.Linear(8, 6, bias=False), act, nn.Linear(6, 6, bias=False), act, nn.Linear(6, 6, bias=False), act,
                  nn.Linear(6, 1, bias=False)]  # fmt: skip
    return nn.Sequential(*layers).double()


def data_and_model(seed: int, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor, nn.Sequential]:
    """20 points, labels ±1, and a network with first weights of variance ¼ over inputs, ½ for ReLU."""
    g = torch.Generator().manual_seed(seed)
    shape = (2, 8) if settings["blocks"] == "convolutions" else (8,)
    x = torch.randn(20, *shape, generator=g, dtype=torch.float64)
    normal = nn.functional.normalize(torch.randn(shape, generator=g, dtype=torch.float64).flatten(), dim=0)
    y = torch.where(x.flatten(1) @ normal > 0, 1.0, -1.0).double()
    x = x + 0.3 * (y[:, None] * normal).view_as(x)
    with torch.random.fork_rng(devices=[]):
        model = network(settings["blocks"], settings["relu"])
    with torch.no_grad():
        for p in model.parameters():
            spread = 2.0 if settings["relu"] else 1.0  # He: half of the units are off
            p.copy_(0.5 * torch.randn(p.shape, generator=g, dtype=torch.float64) * (spread / p[0].numel()) ** 0.5)
    return x, y, model


def grow(model: nn.Module, x: Tensor, y: Tensor) -> bool:
    """One step against the gradient of log Σ exp(−y ν(x)), of length STRIDE times the norm of all weights.

    False where there is no gradient: the point that weighs most has no active path to the output.
    """
    parameters = list(model.parameters())
    risk = torch.logsumexp(-y * model(x)[:, 0], 0)
    gradients = torch.autograd.grad(risk, parameters)
    size = torch.stack([p.detach().norm() for p in parameters]).norm()
    length = torch.stack([v.norm() for v in gradients]).norm()
    if not float(length) > 0:
        return False
    with torch.no_grad():
        for p, v in zip(parameters, gradients):
            p.sub_(STRIDE * size / length * v)
    return True


def compute(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Computes the numbers of one variant and seed."""
    x, y, model = data_and_model(seed, settings)
    wiring = trace(model, x)
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    steps = settings["steps"]
    measured_steps = {0, *np.unique(np.geomspace(1, steps, MEASUREMENTS).round()).astype(int).tolist()}
    curve: list[Any] = []
    smallest_margin = np.inf
    flags: tuple[str, ...] = ()
    for number in range(steps + 1):
        if number in measured_steps:
            result = {name: b for name, b in measure(model, x, initial, wiring).items() if "factor" in b.terms}
            rows = [[b.terms["measured"], b.terms["at this norm"], b.terms["limit"]] for b in result.values()]
            smallest_margin = min(smallest_margin, *(measured - at_norm for measured, at_norm, _ in rows))
            curve.append((number, rows))
            on_progress(number / steps)
        if number < steps and not grow(model, x, y):
            flags = ("a point has no active path left: its loss outweighs all others, and the gradient is 0",)
    last = list(result.values())
    with torch.no_grad():
        right = float((y * model(x)[:, 0] > 0).double().mean())
    values = {
        "ratio": min(b.terms["measured"] for b in last),
        "above": min(b.terms["measured"] - b.terms["limit"] for b in last),
        "room": float(smallest_margin),
        "limit": min(b.terms["limit"] for b in last),
        "printed": min(b.terms["printed limit"] for b in last),
        "drift": max(b.terms["drift"] for b in last),
        "right": right,
    }
    return Outcome(values, {"layers": list(result), "curve": curve}, flags)


def measure(model: nn.Module, x: Tensor, initial: Mapping[str, Tensor], wiring: Any) -> dict[str, Bound]:
    """Evaluates the bound of Theorem 2 at the present weights."""
    return reduced_alignment(model, x, initial, wiring=wiring)


def claims(scale: StepsScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    source = "Training invariances, Theorem 2"

    def never(variant: str, description: str) -> Claim:
        measure = f"{variant}: least measured ratio minus 1/K − D/‖W‖²_F, all layers, about {MEASUREMENTS} looks"
        return Claim(
            f"equation 13 with 2 for 8, {description}",
            source,
            measure,
            (variant,),
            lambda n: n[variant].room,
            above=-0.005,
            kind="universal",
        ).quoting("(1/(8^{N_r(j)} V_c(j))) ‖W_j(t)‖²_F − ‖W_j(t)‖²_2 ≤ D", "stronger")

    def limit(variant: str, description: str) -> Claim:
        measure = f"{variant}: least measured ratio minus the limit, at the end (norms are finite: up to 0.05 below)"
        return Claim(
            f"equation 14 with 2 for 8, {description}",
            source,
            measure,
            (variant,),
            lambda n: n[variant].above,
            above=-0.05,
        ).quoting("1/min(rank(W_k), 8^{N_r(j)} V_c(j)) ≤ ‖W_k(t)‖²_2 / ‖W_k(t)‖²_F ≤ 1", "stronger")

    def below_one(variant: str, description: str) -> Claim:
        text = f"alignment is reduced: some layer stays below 0.99, {description}"
        return Claim(
            text, f"after {source}", f"{variant}: least ratio", (variant,), lambda n: n[variant].ratio, below=0.99
        ).quoting(
            "the ratio ‖W‖_2/‖W‖_F converges to a value strictly less than 1 for some fully-connected layer W", "ours"
        )

    names = {"linear convolutions": CONV["linear"], "linear residual blocks": FREE["linear"], "linear, fully connected": DENSE["linear"]}  # fmt: skip
    nonlinear = {"ReLU convolutions": CONV["ReLU"], "ReLU residual blocks": FREE["ReLU"], "ReLU, fully connected": DENSE["ReLU"]}  # fmt: skip
    return [
        *(never(variant, description) for description, variant in names.items()),
        *(limit(variant, description) for description, variant in names.items()),
        *(never(variant, description) for description, variant in nonlinear.items()),
        *(limit(variant, description) for description, variant in nonlinear.items()),
        *(below_one(variant, description) for description, variant in names.items()),
    ]


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Draws the figures of the study."""
    from matplotlib.figure import Figure

    columns = -(-len(details) // 2)
    figure = Figure(figsize=(1 + 3.6 * columns, 7), layout="constrained")
    axes = figure.subplots(2, columns, squeeze=False, sharex=True, sharey=True)
    panels = axes.T.flat  # linear above ReLU
    for axis, (variant, seeds) in zip(panels, details.items()):
        names, curve = seeds[0]["layers"], seeds[0]["curve"]
        steps = [point[0] for point in curve]
        for k, _ in enumerate(names):
            colour = COLOURS[2 + k % 5]
            axis.plot(steps, [rows[k][0] for _, rows in curve], color=colour, linewidth=1.8, label=f"layer {k + 1}")
            axis.plot(steps, [rows[k][1] for _, rows in curve], color=colour, linestyle="--", linewidth=1.2)
        axis.plot(
            [], [], color=COLOURS[0], linestyle="--", linewidth=1.2, label="dashed: the least that Theorem 2 allows it"
        )
        axis.set(ylim=(0, 1.03), xlim=(1, steps[-1]), title=variant)
        axis.set_xscale("symlog", linthresh=1)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel(r"$\|W\|_2^2\,/\,\|W\|_F^2$  (rank one: 1)")
    for axis in axes[-1]:
        axis.set_xlabel("step")
    maximum = max(axes.flat, key=lambda axis: len(axis.get_legend_handles_labels()[1]))
    handles, labels = maximum.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, fontsize=9, frameon=False)
    figure.suptitle(study.title, fontsize=13)
    return {"figure": (f"{study.title}: measured, and promised by equation 13", figure)}


STUDY = Study(
    "reduced-alignment",
    "Reduced alignment of convolutions and residual blocks",
    "Theorem 2 of Training Invariances and the Low-Rank Phenomenon",
    "Two classes that a hyperplane through the origin separates, exponential loss",
    Computed(
        compute,
        {
            "ratio": ("smallest ‖W‖₂²/‖W‖²_F", "{:.3f}"),
            "limit": ("least limit", "{:.3f}"),
            "printed": ("as printed", "{:.3f}"),
            "above": ("ratio above limit", "{:.3f}"),
            "room": ("smallest distance", "{:.3f}"),
            "drift": ("laws moved", "{:.1e}"),
            "right": ("classified correctly", "{:.0%}"),
        },
        draw,
        "Each colour is a layer of the first seed; solid: measured; dashed: what equation 13\n"
        "promises at that norm from the initial weights, 1/K − D/‖W‖²_F. For ReLU networks the dashed lines are what the paper claims; no proof stands behind them.",
        "Means over seeds, with the range. *Limit*: 1/min(rank, 2^N_r V_c), least of all layers, and the same *as printed*, with 8^N_r.\n"
        "*Above*: least difference of a layer to its own limit. *Smallest distance*: least difference to 1/K − D/‖W‖²_F at any measurement. *Laws moved*: the\n"
        "largest change of W₂'W₂ − W₁W₁' over ‖W‖²_F, by steps of finite length, or because there is no such law.",
        ("Float64, full batch, 20 points; first weights have variance 1/4 over inputs, 1/2 for ReLU.",),
    ),
    SCALES,
    variants,
    claims,
    (
        "Convolutions: 2×8 inputs, kernels of 3 to 4 and 4 channels, linear 16 → 6 → 1. Residual blocks: 8 → 6, two blocks "
        "σ(U σ(Y x) + Z x) of width 6, 6 → 1. Fully connected: 8 → 6 → 6 → 6 → 1.",
        "Steps are 0.001 ‖θ‖ long (a step size of about 1/loss).",
    ),
    asks="alignment of convolutions",
    seconds={"quick": 26, "paper": 440},
    sources=("invariances:Theorem 2",),
)  # fmt: skip
