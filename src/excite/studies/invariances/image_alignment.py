"""Rank and alignment by layer of networks built like AlexNet and ResNet, on images of planes and horses.

The introduction of *Training invariances* explains with its Theorem 2 why layers of AlexNet on CIFAR-10 align only in part, and applies it to
networks like ResNet; it has no experiment. Here both are bias-free, with ReLU, one output and the logistic loss. One variant of each follows
gradient flow's path by normalized steps, four thousandths of the weights' norm long; one is trained by SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from excite._core.randomness import seeded_weights
from excite.bounds import reduced_alignment
from excite.data import load
from excite.probes import alignment
from excite.studies.computed import Computed, OnProgress, Outcome, StepsScale
from excite.studies.figures import COLOURS
from excite.studies.study import Claim, Study, Variant, VariantResult
from excite.train.batches import Shuffle
from excite.wiring import trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NETWORKS = ("AlexNet-like", "ResNet-like")
GROWN = {network: f"{network}, normalized steps" for network in NETWORKS}
TRAINED = {network: f"{network}, SGD" for network in NETWORKS}
STRIDE, LR, BATCH, IMAGES, MEASUREMENTS = 4e-3, 0.05, 20, 200, 10
SETTLED = 0.01  # of ‖W‖₂/‖W‖_F, within the last fifth of training
DENSE = {"AlexNet-like": ("fc1", "fc2"), "ResNet-like": ("fc1",)}  # hidden fully connected layers
JUNCTIONS = {"AlexNet-like": ("fc1>fc2", "fc2>out"), "ResNet-like": ("fc1>out",)}  # between fully connected layers
_INTRODUCTION, _THEOREM = "Training invariances, section 1", "Training invariances, Theorem 2"
_REDUCED = (
    "in experiments on AlexNet over CIFAR-10 the ratio $\\|W\\|_2/\\|W\\|_F$ converges to a value strictly less than 1 for some fully-connected "
    "layer W towards the end of the network"
)
_RANK_ONE = "the limiting weight matrices have rank 1 and adjacent layers align"
_BOUND = "(1/(8^{N_r(j)} V_c(j))) ‖W_j(t)‖²_F − ‖W_j(t)‖²_2 ≤ D"
_HUH = "apply to the experiments in (Huh et al., 2021) for ResNet and CNNs"

SCALES = {
    "quick": StepsScale(name="quick", seeds=5, steps=700, words=f"{IMAGES} images of 16×16, 700 steps, 5 seeds"),
    "paper": StepsScale(name="paper", seeds=8, steps=4_000, words=f"{IMAGES} images of 16×16, 4,000 steps, 8 seeds; the paper has no experiment"),
}  # fmt: skip


def variants(scale: StepsScale) -> list[Variant]:
    """Both networks, with normalized steps and with SGD."""
    return [
        Variant(names[network], {"network": network, "how": how, "steps": scale.steps})
        for names, how in ((GROWN, "grow"), (TRAINED, "sgd"))
        for network in NETWORKS
    ]


class Residual(nn.Module):
    """σ(U σ(Y x) + Z x) with convolutions: a ResNetFree block."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.y = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.u = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.z = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the block."""
        return functional.relu(self.u(functional.relu(self.y(x))) + self.z(x))


class AlexNetLike(nn.Module):
    """Two convolutions with max pooling, two hidden fully connected layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 5, padding=2, bias=False)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.fc1, self.fc2 = nn.Linear(256, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.out = nn.Linear(32, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (B, 1) for images (B, 3, 16, 16)."""
        for conv in (self.conv1, self.conv2):
            x = functional.max_pool2d(functional.relu(conv(x)), 2)
        x = functional.relu(self.fc1(x.flatten(1)))
        result: Tensor = self.out(functional.relu(self.fc2(x)))
        return result


class ResNetLike(nn.Module):
    """A convolution, two residual blocks with weights on the skip connection, average pooling, a hidden fully connected layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.block1, self.block2 = Residual(8, 16, 1), Residual(16, 16, 2)
        self.fc1, self.out = nn.Linear(16, 16, bias=False), nn.Linear(16, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (B, 1) for images (B, 3, 16, 16)."""
        x = self.block2(self.block1(functional.relu(self.stem(x))))
        result: Tensor = self.out(functional.relu(self.fc1(x.mean((2, 3)))))
        return result


def make(network: str, seed: int) -> nn.Module:
    """The network with its first weights."""
    with seeded_weights(seed):
        return AlexNetLike() if network == "AlexNet-like" else ResNetLike()


def images(seed: int) -> tuple[Tensor, Tensor]:
    """Planes (−1) and horses (+1), half the size; other ones for each seed."""
    data = load("cifar10", classes=(0, 7), train=IMAGES, test=2, seed=seed)
    return functional.avg_pool2d(data.x_train, 2), (2 * data.y_train - 1).float()


def grow(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """One step against the gradient of the logarithm of the logistic risk, of length STRIDE times the norm of all weights."""
    parameters = list(model.parameters())
    losses = functional.logsigmoid(y * model(x)[:, 0]).neg()
    gradients = torch.autograd.grad(losses.clamp_min(1e-37).log().logsumexp(0), parameters)
    size = torch.stack([p.detach().norm() for p in parameters]).norm()
    length = torch.stack([g.norm() for g in gradients]).norm().clamp_min(1e-30)
    with torch.no_grad():
        for p, g in zip(parameters, gradients):
            p.sub_(STRIDE * size / length * g)


def descend(model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """One step of the optimizer on the mean logistic loss of a batch."""
    optimizer.zero_grad()
    functional.logsigmoid(y * model(x)[:, 0]).neg().mean().backward()
    optimizer.step()


def batches(size: int, steps: int, how: str, seed: int) -> list[Tensor]:
    """The images of each step: all of them, or a batch of every epoch's order in turn."""
    if how == "grow":
        return [torch.arange(size)] * steps
    shuffle = Shuffle(size, BATCH, seed)
    drawn: list[Tensor] = []
    while len(drawn) < steps:
        drawn += list(torch.as_tensor(shuffle.order()).split(BATCH))
    return drawn[:steps]


def compute(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Trains a network; ratio, effective rank and alignment of its layers along the way."""
    x, y = images(seed)
    network, steps = settings["network"], settings["steps"]
    model = make(network, seed)
    wiring, initial = trace(model, x[:2]), {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    measured_steps = {round(steps * k / MEASUREMENTS) for k in range(MEASUREMENTS + 1)}
    curve: list[dict[str, Any]] = []
    for number, chosen in enumerate([*batches(len(x), steps, settings["how"], seed), None]):
        if number in measured_steps:
            curve.append({"step": number, **measure(model, x[:2], initial, wiring)})
            on_progress(number / steps)
        if chosen is not None and settings["how"] == "grow":
            grow(model, x[chosen], y[chosen])
        elif chosen is not None:
            descend(model, x[chosen], y[chosen], optimizer)
    with torch.no_grad():
        right = float((y * model(x)[:, 0] > 0).double().mean())
    return Outcome({**summarize(network, curve), "right": right}, curve)


def measure(model: nn.Module, example: Tensor, initial: Mapping[str, Tensor], wiring: Any) -> dict[str, Any]:
    """By layer ‖W‖₂/‖W‖_F and the effective rank, by junction the alignment; how far the layers are above the bound of Theorem 2."""
    aligned = alignment(model, example)
    bounds = reduced_alignment(model, example, initial, wiring=wiring).values()
    norm = torch.stack([p.detach().norm() for p in model.parameters()]).norm()
    start = torch.stack([p.norm() for p in initial.values()]).norm()
    return {
        "ratio": {layer.layer: layer.ratio**0.5 for layer in aligned.layers},
        "rank": {layer.layer: layer.effective_rank.low for layer in aligned.layers},
        "aligned": {junction.junction: junction.value for junction in aligned.junctions},
        "room": min(b.terms["measured"] - b.terms["at this norm"] for b in bounds if "factor" in b.terms),
        "growth": float(norm / start),
    }


def summarize(network: str, curve: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers that claims compare, from the measurements of a training run."""
    first, last = curve[0], curve[-1]
    late = curve[-1 - MEASUREMENTS // 5]
    lowest = min(DENSE[network], key=lambda name: last["ratio"][name])
    hidden = [name for name in last["ratio"] if name != "out"]  # one row has rank one
    return {
        "least": last["ratio"][lowest],
        "settled": last["ratio"][lowest] - late["ratio"][lowest],
        **{f"closer_{name}": last["ratio"][name] - first["ratio"][name] for name in DENSE[network]},
        **{f"aligned_{name}": last["aligned"][name] for name in JUNCTIONS[network]},
        "turned": min(last["aligned"][name] - first["aligned"][name] for name in last["aligned"]),
        **{f"rank_{name}": last["rank"][name] / first["rank"][name] for name in hidden},
        "rank": float(np.mean([last["rank"][name] / first["rank"][name] for name in hidden])),
        "room": min(point["room"] for point in curve),
        "growth": last["growth"],
    }


def claims(scale: StepsScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    ratio = "‖W‖₂/‖W‖_F"

    def single(text: str, variant: str, name: str, measure: str, source: str = _THEOREM, **bound: Any) -> Claim:
        return Claim(text, source, f"{variant}: {measure}", (variant,), lambda n: getattr(n[variant], name), **bound)

    def rungs(text: str, variant: str, names: Sequence[str], measure: str, **bound: Any) -> Claim:
        return Claim(
            text,
            _THEOREM,
            f"{variant}: {measure}",
            (variant,),
            lambda n: [getattr(n[variant], name) for name in names],
            **bound,
        )

    result = []
    for network in NETWORKS:
        grown, sgd = GROWN[network], TRAINED[network]
        for variant, words in ((grown, "with normalized steps"), (sgd, "after SGD")):
            result += [
                single(f"{network}: a fully connected layer stays below 0.99 of rank one {words}", variant, "least", f"least {ratio} of the hidden ones", _INTRODUCTION, below=0.99).quoting(_REDUCED, "threshold"),
                single(f"{network}: that layer has settled {words}", variant, "settled", f"change of {ratio} in the last fifth of training", _INTRODUCTION, within=SETTLED).quoting(_REDUCED, "threshold"),
                rungs(f"{network}: fully connected layers come closer to rank one {words}", variant, [f"closer_{name}" for name in DENSE[network]], f"{ratio}, end minus start, every hidden one", above=0.0).quoting(_RANK_ONE, "weaker"),
                rungs(f"{network}: adjacent fully connected layers align {words}", variant, [f"aligned_{name}" for name in JUNCTIONS[network]], "absolute value of ⟨v, u⟩ at the end, every pair", above=0.9).quoting(_RANK_ONE, "threshold"),
            ]  # fmt: skip
        hidden = [name for name, _ in make(network, 0).named_parameters() if name != "out.weight"]
        result += [
            single(f"{network}: equation 13 with 2 for 8", grown, "room", f"least measured ratio minus 1/K − D/‖W‖²_F, all layers, {MEASUREMENTS + 1} measurements", above=-0.005, kind="universal").quoting(_BOUND, "stronger"),
            single(f"{network}: every two neighbouring layers align better than at the start", grown, "turned", "absolute value of ⟨v, u⟩, end minus start, the least of all junctions", above=0.0).quoting(_RANK_ONE, "ours"),
            rungs(f"{network}: training lowers the effective rank of every hidden layer", sgd, [f"rank_{name.removesuffix('.weight')}" for name in hidden], "effective rank of the weights, end over start, every layer", below=1.0).quoting(_HUH, "ours"),
        ]  # fmt: skip
    return result


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """‖W‖₂/‖W‖_F by layer and alignment by junction over training, means over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(details) + 0.6, 7.2), layout="constrained")
    axes = figure.subplots(2, len(details), sharey="row", squeeze=False)
    for column, (variant, seeds) in zip(axes.T, details.items()):
        steps = [point["step"] for point in seeds[0]]
        for axis, name in zip(column, ("ratio", "aligned")):
            for number, key in enumerate(key for key in seeds[0][0][name] if not (name == "ratio" and key == "out")):
                mean = np.mean([[point[name][key] for point in seed] for seed in seeds], axis=0)
                colour, dashes = COLOURS[number % len(COLOURS)], "-" if number < len(COLOURS) else "--"
                axis.plot(steps, mean, dashes, color=colour, linewidth=1.6, label=key)
            axis.set(ylim=(0, 1.02))
            axis.grid(alpha=0.3)
        column[0].legend(fontsize=7, ncols=2, loc="upper right")
        column[1].legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
        column[0].set_title(variant, fontsize=10)
        column[1].set_xlabel("step")
    axes[0][0].set_ylabel(r"$\|W\|_2\,/\,\|W\|_F$  (rank one: 1)")
    axes[1][0].set_ylabel("alignment |⟨v, u⟩| of neighbouring layers")
    figure.suptitle(study.title, fontsize=12)
    return {"figure": (f"{study.title}: rank by layer, alignment by junction", figure)}


STUDY = Study(
    "image-alignment",
    "Rank and alignment of AlexNet- and ResNet-like networks on images",
    "section 1 and Theorem 2 of Training Invariances and the Low-Rank Phenomenon (no figure of the paper)",
    f"CIFAR-10, {IMAGES} planes and horses of 16×16 pixels, logistic loss",
    Computed(
        compute,
        {
            "least": ("least ‖W‖₂/‖W‖_F, fully connected", "{:.3f}"),
            "settled": ("its change in the last fifth", "{:+.3f}"),
            "turned": ("least gain of alignment", "{:+.2f}"),
            "rank": ("effective rank, end over start", "{:.2f}"),
            "room": ("room above the bound", "{:.3f}"),
            "growth": ("norm, end over start", "{:.1f}"),
            "right": ("classified correctly", "{:.0%}"),
        },
        draw,
        "Top: how close each hidden layer is to rank one. Bottom: alignment of what makes some channels with what reads them. Means over seeds.",
        "Means over seeds, with the range. *Least*: of the hidden fully connected layers. *Effective rank*: of the weights, mean over hidden layers.\n"
        "*Room*: least difference of a layer's ‖W‖₂²/‖W‖²_F to 1/K − D/‖W‖²_F at any measurement.",
        (f"Float32, no biases, torch's first weights. *Normalized steps*: all images, steps of {STRIDE} ‖θ‖ against the gradient of the log-risk. *SGD*: "
         f"batches of {BATCH}, learning rate {LR}, momentum 0.9. Seeds determine weights, images and order.",),
        data=("cifar10",),
    ),
    SCALES,
    variants,
    claims,
    ("AlexNet-like: convolutions 3→8 (5×5) and 8→16 (3×3), each with max pooling, then 256 → 32 → 32 → 1. ResNet-like: a convolution 3→8, blocks "
     "σ(U σ(Y x) + Z x) 8→16 and 16→16, average pooling, then 16 → 16 → 1.",
     "For ReLU networks the paper's proof of equation 13 has a gap ([theory](../theory.md)): that the bound holds here is a measurement.",
     "Norms grew by a fifth with normalized steps and to about twice with SGD: the theorem's limit is not reached, and a layer that has not settled decides nothing about it."),
    asks="AlexNet, ResNet on images?",
    seconds={"quick": 120},
    sources=("invariances:section 1", "invariances:Theorem 2"),
)  # fmt: skip
