"""Lemma 2 of Training invariances on random graphs: ν = μ ∘ h, the derivative of equation 2, and how many paths there are.

Graphs are random DAGs with skip connections of every length; weights are normal. Counts are of well-known kinds of networks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from excite.studies.computed import Computed, OnProgress, Outcome, StepsScale
from excite.studies.figures import COLOURS, DASHES
from excite.studies.study import Claim, Study, Variant, VariantResult
from excite.train.models.resnet import resnet
from excite.wiring import Graph, decompose, path_count
from excite.wiring.paths import LIMIT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


KINDS = {"ReLU": (0.0, 1.0), "leaky ReLU": (0.1, 1.0), "linear": (1.0, 1.0)}
COUNTS = "paths of networks"
POINTS = 5

SCALES = {
    "quick": StepsScale(name="quick", seeds=2, steps=20, words="20 graphs with 6 hidden vertices per variant, 2 seeds"),
    "paper": StepsScale(name="paper", seeds=4, steps=60, words="60 graphs with 6 hidden vertices per variant, 4 seeds"),
}


def variants(scale: StepsScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    result = [Variant(activation, {"graphs": scale.steps, "slope": list(slope)}) for activation, slope in KINDS.items()]
    return [
        *result,
        Variant(COUNTS, {"width": 8, "side": 8, "depths": [2, 4, 8]} if scale.name == "quick" else {"width": 64}),
    ]


def graph(rng: np.random.Generator, slope: tuple[float, float], hidden: int = 6) -> Graph:
    """Random acyclic graph with three inputs and one output."""
    names = ["i0", "i1", "i2", *(f"v{k}" for k in range(hidden)), "o"]
    pairs = [(a, b) for a, b in combinations(names, 2) if not b.startswith("i")]
    weights = {pair: float(rng.normal()) for pair in pairs if rng.random() < 0.7}
    weights.setdefault(("i0", "o"), 1.0)
    return Graph(("i0", "i1", "i2"), "o", weights, {name: slope for name in names if name.startswith("v")})


def differences(net: Graph, x: np.ndarray, edge: tuple[str, str], size: float = 1e-6) -> float:
    """The central difference of ν by the weight of an edge."""
    ends = [Graph(net.inputs, net.output, {**net.weights, edge: net.weights[edge] + s}, net.slopes).value(x) for s in (-size, size)]  # fmt: skip
    return (ends[1] - ends[0]) / (2 * size)


def compute(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Computes the numbers of one variant and seed."""
    return counted(**settings) if "width" in settings else compared(settings, seed, on_progress)


def compared(settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
    """Compares the value of random graphs with the sum over their paths."""
    rng = np.random.default_rng(seed)
    errors, slopes, maximum, pattern = [], [], 0, 0.0
    for number in range(settings["graphs"]):
        net = graph(rng, tuple(settings["slope"]))
        decomposition = decompose(net)
        maximum = max(maximum, len(decomposition.paths))
        for x in rng.normal(size=(POINTS, 3)):
            errors.append(decomposition.error(x))
            pattern = max(
                pattern, float(np.abs(decomposition.mu.gradient(decomposition.h(x)) - decomposition.active(x)).max())
            )
        edge = list(net.weights)[int(rng.integers(len(net.weights)))]
        result = decomposition.derivative(x, edge)
        slopes.append(abs(result - differences(net, x, edge)) / max(1.0, abs(result)))
        on_progress((number + 1) / settings["graphs"])
    values = {"error": max(errors), "slope": float(np.median(slopes)), "pattern": pattern, "paths": float(maximum)}
    return Outcome(values, {"errors": errors})


def counted(width: int, side: int = 32, depths: Sequence[int] = (2, 4, 8, 16, 32)) -> Outcome:
    """log10 of the number of paths. Depth d of width n has n^(d + 1); an identity skip over each two layers adds little."""
    x = torch.zeros(2, width)
    plain = [nn.Sequential(*(nn.Linear(width, width) for _ in range(d)), nn.Linear(width, 1)) for d in depths]
    images = torch.zeros(2, 3, side, side)
    convolutions = [
        nn.Sequential(*(nn.Conv2d(3 if k == 0 else width, width, 3, padding=1) for k in range(d)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1))
        for d in depths
    ]  # fmt: skip
    blocks = [resnet(width=width, stages=1, blocks=d // 2) for d in depths]
    logs = {
        "fully connected": [path_count(m, x).log10 for m in plain],
        "convolutions": [path_count(m, images).log10 for m in convolutions],
        "residual": [path_count(m, images).log10 for m in blocks],
    }
    eighteen = path_count(resnet(width=width, stages=4), images).log10
    expected = np.array([(d + 1) * np.log10(width) for d in depths])
    values = {
        "count error": float(np.abs(np.array(logs["fully connected"]) - expected).max()),
        "resnet18": eighteen,
        "skips": float(logs["residual"][-1] - logs["convolutions"][-1]),
    }
    return Outcome(values, {"depths": list(depths), "logs": logs, "width": width, "side": side})


def claims(scale: StepsScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""

    def exact(activation: str) -> Claim:
        measure = f"{activation}: largest difference of ν and μ∘h, over the sum of absolute products h"
        return Claim(f"ν = μ ∘ h with weights ±1, {activation}", "Training invariances, Lemma 2", measure, (activation,), lambda n: n[activation].error, below=1e-12, kind="exact").quoting(
            "there exists a tree network μ : R^ρ → R such that ν = μ ∘ h where h : R^d → R^ρ is the path enumeration function of G"
        )  # fmt: skip

    return [
        *(exact(activation) for activation in KINDS),
        Claim(
            "equation 2 is the derivative by a weight",
            "Training invariances, equation 2",
            "leaky ReLU: median difference to a central difference",
            ("leaky ReLU",),
            lambda n: n["leaky ReLU"].slope,
            below=1e-6,
            kind="exact",
        ).quoting("(using Lemma 2) ∂ν/∂w_e = Σ_{p∈P|e∈p} [∇_w μ(x; w)]_p · x_p Π_{f∈p, f≠e} w_f"),
        Claim(
            "the gradient of μ at h(x) is the pattern Z of active paths: equations 2 and 3 say the same",
            "excite.wiring.Decomposition",
            "ReLU: largest difference",
            ("ReLU",),
            lambda n: n["ReLU"].pattern,
            below=1e-9,
            kind="exact",
        ),
    ]


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """Draws the figures of the study."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    errors = {variant: seeds[0]["errors"] for variant, seeds in details.items() if "errors" in seeds[0]}
    bins = np.geomspace(1e-18, 1e-14, 33)
    for k, (variant, result) in enumerate(errors.items()):
        left.hist(
            np.maximum(result, 1.01e-18), bins, histtype="step", linewidth=1.8, color=COLOURS[2 + k], label=variant
        )
    left.axvline(1e-12, color=COLOURS[0], linestyle="--", linewidth=1.2)
    left.set(xscale="log", xlim=(1e-18, 1e-11), xlabel="|ν(x) − μ(h(x))| / Σ|h|", ylabel="points")
    left.set_title(
        "the decomposition holds to rounding (dashed: claimed 1e-12;\nfirst bin: errors of exactly 0)", fontsize=10
    )
    left.legend()
    for seeds in details.values():
        if "logs" in seeds[0]:
            result = seeds[0]
            for k, (name, logs) in enumerate(result["logs"].items()):
                right.plot(result["depths"], logs, marker="o", color=COLOURS[2 + k], linestyle=DASHES[k], label=name)
            right.set_title(
                f"number of paths, width {result['width']} (images of {result.get('side', 32)}×{result.get('side', 32)})",
                fontsize=10,
            )
            right.axhline(np.log10(LIMIT), color=COLOURS[0], linestyle=":", linewidth=1.2, label="limit of enumeration")
            right.legend()
    right.set(xlabel="layers", ylabel="log10 of the number of paths")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.suptitle(study.title, fontsize=13)
    return {"figure": (f"{study.title}: errors, and numbers of paths", figure)}


STUDY = Study(
    "decomposition",
    "A network as a multilinear function and a tree of signs",
    "Lemma 2 and equation 2 of Training Invariances and the Low-Rank Phenomenon",
    "Random feedforward graphs; paths of larger networks",
    Computed(
        compute,
        {
            "error": ("largest error of μ∘h", "{:.1e}"),
            "slope": ("median error of equation 2", "{:.1e}"),
            "pattern": ("∇μ against Z", "{:.1e}"),
            "paths": ("most paths", "{:.0f}"),
            "resnet18": ("log10 paths, ResNet-18", "{:.1f}"),
        },
        draw,
        "Left: |ν(x) − μ(h(x))| over Σ|h|, all graphs and points of the first seed; rounding is 1e-16. Right: the number of paths, counted\n"
        "without listing them, beside the limit of 100,000 beyond which enumeration is refused.",
        "Largest values over graphs, means and ranges over seeds. Equation 2 is compared with central differences, which have an error\n"
        "of about 1e-10 away from kinks, and any error at one: hence the median. The tests compare it with autograd.",
        ("Weights are standard normal; each pair of vertices is joined with probability 0.7.",),
    ),
    SCALES,
    variants,
    claims,
    (
        "Of convolutions and residual blocks the widths are those of all layers; residual networks have one more in front.",
    ),
    asks="a network as a tree of signs",
    seconds={"quick": 6, "paper": 140},
    sources=("invariances:Lemma 2", "invariances:equation 2",),
)  # fmt: skip
