"""Study `conservation-real`: the ledger of a residual network and a small transformer through ordinary training.

Minibatches, float32, cross-entropy; plain SGD, SGD with momentum and decay, AdamW. Scale "paper" (the paper has no such
experiment) takes ResNet-18 on CIFAR-10 and a transformer on its patches: minutes on a large GPU, several runs side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from excite._core.randomness import seeded_weights
from excite.data import load
from excite.probes import conservation
from excite.studies.computed import Computed, OnProgress, Outcome, Resumable, StepsScale
from excite.studies.figures import COLOURS
from excite.studies.invariances.conservation_measures import (
    balances,
    forgotten,
    fractions,
    growth,
    imbalance,
    rate_of_decay,
    sizes,
)
from excite.studies.study import Claim, Study, Variant, VariantResult
from excite.train.from_config import find_device
from excite.train.models.architectures import build

if TYPE_CHECKING:
    from matplotlib.figure import Figure


OPTIMIZERS: dict[str, Callable[[nn.Module, int], torch.optim.Optimizer]] = {
    "SGD": lambda model, steps: torch.optim.SGD(model.parameters(), lr=0.05),
    "momentum and decay": lambda model, steps: torch.optim.SGD(
        model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-3
    ),
    "AdamW": lambda model, steps: torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05),
}
MODELS = ("residual network", "transformer")
SMALL = 0.01  # a law that moved by less than this fraction of its weights counts as conserved
FLOAT32 = 1e-4


@dataclass(frozen=True, kw_only=True)
class RealScale(StepsScale):
    """Data, network and number of steps."""

    data: str
    width: int
    stages: int
    batch: int
    images: int | None


SCALES = {
    "quick": RealScale(
        name="quick", seeds=3, steps=150, data="digits", width=8, stages=2, batch=32, images=500,
        words="8×8 digits, 150 steps, a residual network of width 8, a transformer of 2 layers",
    ),
    "paper": RealScale(
        name="paper", seeds=3, steps=2000, data="cifar10", width=64, stages=4, batch=128, images=None,
        words="CIFAR-10, 2,000 steps of 128 images, ResNet-18, a transformer of 6 layers and width 256",
    ),
}  # fmt: skip


class Transformer(nn.Module):
    """Patches of an image through encoder layers with ReLU, then their mean."""

    def __init__(self, shape: tuple[int, ...], patch: int, width: int, layers: int, outputs: int):
        super().__init__()
        self.embed = nn.Conv2d(shape[0], width, patch, patch)
        self.place = nn.Parameter(torch.randn(1, (shape[1] // patch) * (shape[2] // patch), width) / 50)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the module."""
        x = self.embed(x).flatten(2).transpose(1, 2) + self.place
        return self.head(self.norm(self.encoder(x)).mean(1))  # type: ignore[no-any-return]


def network(settings: Mapping[str, Any], shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    """Builds the network of a variant."""
    width, stages = settings["width"], settings["stages"]
    if settings["model"] == "residual network":
        return build("resnet", seed=seed, channels=shape[0], outputs=outputs, width=width, stages=stages)
    with seeded_weights(seed):
        return Transformer(shape, 2 if shape[1] < 16 else 4, 4 * width, 2 if stages < 4 else 6, outputs)


def compute(settings: Mapping[str, Any], seed: int, device: str, folder: Path, on_progress: OnProgress) -> Outcome:
    """Computes the numbers of one variant and seed."""
    place = find_device(device)
    data = load(settings["data"], train=settings["images"]).to(place)
    model = network(settings, data.shape, len(data.classes), seed).to(place)
    steps, size = settings["steps"], settings["batch"]
    optimizer = OPTIMIZERS[settings["optimizer"]](model, steps)
    order = torch.Generator().manual_seed(seed)
    measured_steps = {int(1.3**k) for k in range(60)} | {steps}
    parameters, curve, balance = dict(model.named_parameters()), [], []
    # Convolutions in full float32: TF32 would leave a rest of its own.
    with full_precision(), conservation(model, optimizer, data.x_train[:2]) as ledger:
        balance.append((0, balances(ledger.read(), parameters)))
        for step in range(1, steps + 1):
            own = torch.randint(len(data.x_train), (size,), generator=order).to(place)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.x_train[own]), data.y_train[own]).backward()
            optimizer.step()
            if step in measured_steps:
                report = ledger.read()
                curve.append((step, sizes(report)))
                balance.append((step, balances(report, parameters)))
                on_progress(step / steps)
    with torch.no_grad():
        model.eval()
        right = (model(data.x_test[:500]).argmax(1) == data.y_test[:500]).float().mean().item()
    result = curve[-1][1]
    apart, left = imbalance(report)
    values = {
        "drift": result["drift"],
        **fractions(report),
        "rest": max(entry.relative for entry in report.entries),
        "imbalance": apart,
        "left": left,
        "forgotten": forgotten(left, rate_of_decay(optimizer), steps),
        "growth": growth(report),
        "laws": float(len(report.entries)),
        "without": float(len(report.unchecked)),
        "right": right,
    }
    laws = [{"name": e.name, "law": e.law, "drift": e.moved, "rest": e.relative} for e in report.entries]
    return Outcome(values, {"curve": curve, "balance": balance, "laws": laws})


def full_precision() -> AbstractContextManager[None]:
    """Context in which convolutions on a GPU are computed in float32, not TF32."""
    return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=False)


def name(model: str, optimizer: str) -> str:
    """Name of the variant."""
    return f"{model}, {optimizer}"


def variants(scale: RealScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    common = {k: getattr(scale, k) for k in ("steps", "data", "width", "stages", "batch", "images")}
    return [
        Variant(name(model, optimizer), {**common, "model": model, "optimizer": optimizer})
        for model in MODELS for optimizer in OPTIMIZERS
    ]  # fmt: skip


_SLACK = "To control singular values of adjacent layers' matrix representations, we need to control the growth of the slack term using the step size η."


def claims(scale: RealScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    source = "Training invariances, appendix F"

    def of(variant: str, text: str, measure: str, effect: Callable[[Any], float], source: str, **bound: Any) -> Claim:
        return Claim(text, source, f"{variant}: {measure}", (variant,), lambda n: effect(n[variant]), **bound)

    result = []
    for model in MODELS:
        plain, heavy, adam = (name(model, optimizer) for optimizer in OPTIMIZERS)
        left = ("largest residual of a channel, relative", lambda n: n.rest)
        drift = ("drift of all laws, relative", lambda n: n.drift)
        result += [
            of(plain, f"{model}: the residual of SGD is rounding", *left, source, below=FLOAT32, kind="exact").quoting(_SLACK, "stronger"),
            of(heavy, f"{model}: with momentum and decay too", *left, "excite.probes.conservation", below=FLOAT32, kind="exact"),
            of(adam, f"{model}: and with AdamW", *left, "excite.probes.conservation", below=FLOAT32, kind="exact"),
            of(plain, f"{model}: SGD conserves its laws", *drift, source, below=SMALL).quoting(_SLACK, "threshold"),
            of(heavy, f"{model}: momentum and decay conserve them, too", *drift, f"{source}, read beyond it", below=SMALL).quoting(_SLACK, "ours"),
            of(adam, f"{model}: AdamW conserves them, too", *drift, f"{source}, read beyond it", below=SMALL).quoting(_SLACK, "ours"),
            of(
                heavy, f"{model}: decay alone explains most of the drift of momentum and decay",
                "fraction of the drift", lambda n: n.decay, "the law of decay, Q → Q (1 − ηλ)²", above=0.5,
            ),
            of(
                heavy, f"{model}: the initial imbalance decays at the rate of weight decay alone",
                "measured rate over 2ηλ/(1 − μ), its distance to 1", lambda n: abs(n.forgotten - 1),
                "the law of decay, through the momentum buffer", below=0.1,
            ),
            of(
                adam, f"{model}: with AdamW too", "measured rate over 2ηλ, its distance to 1",
                lambda n: abs(n.forgotten - 1), "the law of decay", below=0.1,
            ),
            of(
                adam, f"{model}: rescaling explains most of the drift of AdamW",
                "fraction of the drift", lambda n: n.rescaling, "excite.probes.conservation", above=0.5,
            ),
        ]  # fmt: skip
    plain, heavy, _ = (name("residual network", optimizer) for optimizer in OPTIMIZERS)
    grown = "squared weights in front of normalizations, end over start"
    return [
        *result,
        of(
            plain,
            "SGD increases the weights in front of normalizations",
            grown,
            lambda n: n.growth,
            f"after {source}",
            above=1.0,
        ),
        of(heavy, "with momentum and decay they shrink", grown, lambda n: n.growth, "the law of decay", below=1.0),
    ]


_LINES = {
    "drift": ("#000000", "-", "drift"),
    "step": (COLOURS[2], "--", "by the step size"),
    "momentum": (COLOURS[1], "--", "by momentum"),
    "decay": (COLOURS[3], "--", "by decay"),
    "rescaling": (COLOURS[4], "--", "by rescaling"),
    "eps": (COLOURS[5], ":", "by eps of normalizations"),
    "rest": ("#888888", "-", "residual"),
}
_FLOOR = 1e-10


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Draws the figures of the study."""
    return {
        "figure": (f"{study.title}: drift and its terms", _terms_figure(study, details)),
        "balance": ("Balance of layers: producers of channels over consumers", _balance(details)),
    }


def _panels(count: int) -> tuple[Figure, Any]:
    from matplotlib.figure import Figure

    columns = min(3, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(1 + 3.3 * columns, 1 + 2.9 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    return figure, axes


def _balance(details: Mapping[str, list[Any]]) -> Figure:
    from matplotlib import colormaps

    figure, axes = _panels(len(details))
    for axis, (variant, seeds) in zip(axes.flat, details.items()):
        curve = seeds[0]["balance"]
        laws = list(curve[0][1])
        steps = [max(step, 0.5) for step, _ in curve]  # the start, on a logarithmic axis
        for number, law in enumerate(laws):
            colour = colormaps["viridis"](0.9 * number / max(len(laws) - 1, 1))
            axis.plot(steps, [result[law] for _, result in curve], color=colour, linewidth=1.2)
        axis.axhline(1, color="#000000", linewidth=0.8, linestyle=":")
        axis.set(xscale="log", yscale="log")
        axis.set_title(variant, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("‖producers of channels‖²\nover ‖consumers‖²")
    figure.suptitle(
        "Balance of layers: one line per law, from the first layer (dark) to the last (bright)", fontsize=13
    )
    return figure


def _terms_figure(study: Study, details: Mapping[str, list[Any]]) -> Figure:
    figure, axes = _panels(len(details))
    for axis, (variant, seeds) in zip(axes.flat, details.items()):
        curve = seeds[0]["curve"]
        for term, (colour, dashes, label) in _LINES.items():
            result = [(step, sizes[term]) for step, sizes in curve]
            # A part that does not occur keeps its place in the legend.
            shown = [(step, value) for step, value in result if value > _FLOOR]
            axis.plot(*(zip(*shown) if shown else ([], [])), color=colour, linestyle=dashes, linewidth=1.8, label=label)
        axis.set(xscale="log", yscale="log", ylim=(_FLOOR, 3))
        axis.set_title(variant, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("change of the conserved numbers\n(relative to squared weights)")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, fontsize=9, frameon=False)
    figure.suptitle(study.title, fontsize=13)
    return figure


STUDY = Study(
    "conservation-real",
    "What ordinary training conserves, and what moves it",
    "appendix F of Training Invariances and the Low-Rank Phenomenon, in ordinary training (no figure of the paper)",
    "Images of ten classes, minibatches, cross-entropy, float32",
    Computed(
        Resumable(compute),
        {
            "drift": ("drift", "{:.1e}"),
            "step": ("by the step size", "{:.0%}"),
            "momentum": ("by momentum", "{:.0%}"),
            "decay": ("by decay", "{:.0%}"),
            "rescaling": ("by rescaling", "{:.0%}"),
            "eps": ("by eps", "{:.0%}"),
            "rest": ("largest residual", "{:.0e}"),
            "imbalance": ("imbalance, end over start", "{:.2f}"),
            "left": ("remaining initial imbalance", "{:.2f}"),
            "forgotten": ("its rate over that of weight decay", "{:.2f}"),
            "growth": ("weights before normalizations", "× {:.2f}"),
            "right": ("test accuracy", "{:.0%}"),
        },
        draw,
        "Norms over all channels of all laws, relative to the squared weights, first seed: how far the conserved\n"
        "quantities have drifted (black), the terms that explain it, and the residual (grey). The second figure: for every law with consumers, in order of the\n"
        "network from dark to bright, ‖producers of its channels‖² over ‖consumers‖²; at 1 the two are in balance.",
        "Means over seeds, with the range. *Drift* is the norm of Q − Q₀ over all channels of all laws, relative to the squared weights;\n"
        "terms are fractions ⟨term, drift⟩/‖drift‖², which sum to 100 % with the residual. *Imbalance* is the norm of Q over laws with\n"
        "consumers, at the end over at the start: below one, producers and consumers have come closer. *Remaining initial imbalance*\n"
        "is ⟨Q, Q₀⟩/‖Q₀‖² over the same laws: 1 where they are conserved, exp(−2rt) after t steps where nothing acts but decay, with\n"
        "r = ηλ, and ηλ/(1 − μ) with momentum μ; *its rate over that of weight decay* is its rate over 2r (negative: imbalance grows), where\n"
        "there is decay. The last but one column: Σ w² before\n"
        "normalizations, end over start, which for plain SGD is 1 + Σ η² ‖g‖² / Σ w², up to eps.",
        (
            "SGD: rate 0.05. Momentum 0.9: rate 0.02, decay 0.005. AdamW: rate 0.001, decay 0.05. The same batches for all.",
            "Float32 throughout, TF32 off.",
        ),
    ),
    SCALES,
    variants,
    claims,
    (
        "All effects of weight decay are attributed to it, also those through the momentum buffer: a buffer of 0.9 applies it ten times.",
        "Channels without a law (for example a stream to which the model's input is added) are left out.",
    ),
    asks="conserved in real training?",
    seconds={"quick": 42},
    sources=("invariances:appendix F",),
)
