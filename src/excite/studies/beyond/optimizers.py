"""Questions of the paper's conclusion: other optimizers, normalization layers, the trajectories of weights.

The task of `frequency`, batches of ten (batch normalization needs more than one), six ways to train. For each of them: does
the trajectory of the first bias order the four functions by frequency? Does that of the weights? And is the normalized update
of the bias the exact slope?
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from excite.studies.computed import Computed, Jointly, OnProgress, Outcome, StepsScale
from excite.studies.figures import COLOURS, plain_ticks
from excite.studies.study import Claim, Study, Variant, VariantResult
from excite.studies.trajectory.frequency import FIT, points, thinned

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FREQUENCIES = (0.25, 0.5, 0.75, 1.0)
SGD, MOMENTUM, ADAM, ADAMW, LAYER, BATCH = WAYS = (
    "SGD", "momentum", "Adam", "AdamW", "SGD, layer normalization", "SGD, batch normalization",
)  # fmt: skip
_SETTINGS: dict[str, tuple[str, float, str]] = {  # optimizer, learning rate, normalization
    SGD: ("sgd", 1e-2, "none"),
    MOMENTUM: ("momentum", 1e-3, "none"),
    ADAM: ("adam", 1e-3, "none"),
    ADAMW: ("adamw", 1e-3, "none"),
    LAYER: ("sgd", 1e-2, "layer"),
    BATCH: ("sgd", 1e-2, "batch"),
}
Normalization = Literal["none", "layer", "batch"]
_MOMENTUM, _EPS = 0.1, 1e-5  # of the running statistics, as in nn.BatchNorm1d
_SOURCE = "What training reveals, section 7 (as a question)"
_POINTS = 100


@dataclass(frozen=True, kw_only=True)
class WaysScale(StepsScale):
    """A number of steps, and a factor of SGD's learning rates."""

    times: int = 1  # the learning rates of SGD, with momentum or not: fewer steps must fit the functions, too


SCALES = {
    "quick": WaysScale(
        name="quick", seeds=5, steps=5_000, times=6,
        words="500 epochs instead of 3,000, with six times the learning rates of SGD and momentum; 5 repeats",
    ),
    "paper": WaysScale(name="paper", seeds=10, steps=30_000, words="3,000 epochs as in `frequency`, 10 repeats"),
}  # fmt: skip


def variants(scale: WaysScale) -> list[Variant]:
    """Variants that are trained at a scale."""
    base = {"steps": scale.steps, "batch": 10, "points": _POINTS, "test": 30, "widths": [10, 32, 32, 32]}
    return [
        Variant(
            way, {**base, "optimizer": name, "lr": lr * (1 if "adam" in name else scale.times), "normalization": norm}
        )
        for way, (name, lr, norm) in _SETTINGS.items()
    ]


class NetworkStack(nn.Module):
    """S networks: a fixed identity with a trained bias, ReLU, hidden layers with a normalization before each ReLU, one output.

    Weights are stacked (S, out, in). The sum of the networks' losses has in each network's weights the gradient of its own
    loss, and optimizers that work entry by entry treat each network as if it were alone.

    `forward` gives f (S, B) and the outputs z_l (S, B, n_l) of the affine layers, and what each of them was given.
    """

    def __init__(self, seeds: Sequence[int], widths: Sequence[int], normalization: Normalization):
        super().__init__()
        self.normalization = normalization
        count = len(seeds)
        sizes = list(zip([*widths[1:], 1], widths))
        drawn = []
        for seed in seeds:  # what torch.nn.Linear starts from
            generator = torch.Generator().manual_seed(seed)

            def uniform(inputs: int, *shape: int, generator: torch.Generator = generator) -> Tensor:
                return torch.empty(shape).uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)

            first = uniform(widths[0], widths[0])
            drawn.append((first, [uniform(i, o, i) for o, i in sizes], [uniform(i, o) for o, i in sizes]))
        self.first = nn.Parameter(torch.stack([network[0] for network in drawn]))
        self.weights = nn.ParameterList(torch.stack([network[1][k] for network in drawn]) for k in range(len(sizes)))
        self.biases = nn.ParameterList(torch.stack([network[2][k] for network in drawn]) for k in range(len(sizes)))
        scaled = sizes[:-1] if normalization != "none" else []
        self.scales = nn.ParameterList(torch.ones(count, o) for o, _ in scaled)
        self.shifts = nn.ParameterList(torch.zeros(count, o) for o, _ in scaled)
        self.means = [torch.zeros(count, 1, o) for o, _ in scaled]
        self.variances = [torch.ones(count, 1, o) for o, _ in scaled]

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Applies the module."""
        z = [x + self.first[:, None]]
        layer_inputs = [x]
        for k, (weight, bias) in enumerate(zip(self.weights, self.biases)):
            inner = z[-1] if k == 0 else self._normalized(z[-1], k - 1)
            layer_inputs.append(inner.relu())
            z.append(torch.baddbmm(bias[:, None], layer_inputs[-1], weight.mT))
        return z[-1][:, :, 0], z, layer_inputs

    def _normalized(self, z: Tensor, k: int) -> Tensor:
        if self.normalization == "none":
            return z
        if self.normalization == "layer":
            mean, variance = z.mean(2, keepdim=True), z.var(2, unbiased=False, keepdim=True)
        elif self.training:
            mean, variance = z.mean(1, keepdim=True), z.var(1, unbiased=False, keepdim=True)
            with torch.no_grad():
                size = z.shape[1]
                self.means[k].lerp_(mean, _MOMENTUM)
                self.variances[k].lerp_(variance * (size / max(1, size - 1)), _MOMENTUM)
        else:
            mean, variance = self.means[k], self.variances[k]
        scaled: Tensor = (z - mean) * torch.rsqrt(variance + _EPS) * self.scales[k][:, None] + self.shifts[k][:, None]
        return scaled


@dataclass(frozen=True)
class Trajectories:
    """Curves (S, T) over windows of steps.

    Means over samples of the normalized update of the first bias, of all weights (√Σ‖dL/dW_l‖² / |dL/df|, each sample's own), the
    training loss, and at each window's end the exact mean slope at the training points in evaluation mode and the test loss.
    """

    bias: Tensor
    weights: Tensor
    loss: Tensor
    slope: Tensor
    test: Tensor


def train(
    networks: NetworkStack,
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    *,
    steps: int,
    batch: int,
    windows: int,
    progress: Callable[[float], None] = lambda fraction: None,
) -> Trajectories:
    """Trains all networks on `data`, x (S, N, n) and y (S, N).

    One order of points for all; half squared error, mean over the batch.
    """
    x, y = data
    generator = torch.Generator().manual_seed(0)
    parameters = [p for p in networks.parameters() if p.requires_grad]
    rows: list[list[Tensor]] = [[], [], [], [], []]
    sums, window, order = (
        [torch.zeros(len(x)) for _ in range(3)],
        max(1, steps // windows),
        torch.empty(0, dtype=torch.long),
    )
    for step in range(steps):
        if len(order) < batch:
            order = torch.randperm(x.shape[1], generator=generator)
        at, order = order[:batch], order[batch:]
        f, z, layer_inputs = networks(x[:, at])
        loss = (f - y[:, at]).square().mean(1) / 2
        result = torch.autograd.grad(loss.sum(), [f, *z, *parameters])
        for p, g in zip(parameters, result[1 + len(z) :]):
            p.grad = g
        optimizer.step()
        error = result[0].abs()
        norms = [g.norm(dim=2) for g in result[1 : 1 + len(z)]]
        squares = sum((n * h.detach().norm(dim=2)).square() for n, h in zip(norms[1:], layer_inputs[1:]))
        fine = (error > 0).float()
        safe = torch.where(error > 0, error, 1.0)
        count = fine.sum(1).clamp(min=1)
        sums[0] += (norms[0] / safe * fine).sum(1) / count
        sums[1] += (squares.sqrt() / safe * fine).sum(1) / count
        sums[2] += loss.detach()
        if (step + 1) % window == 0:
            slope, far = evaluate(networks, x, test)
            for row, value in zip(rows, (*(s / window for s in sums), slope, far)):
                row.append(value)
            sums = [torch.zeros(len(x)) for _ in range(3)]
            progress((step + 1) / steps)
    return Trajectories(*(torch.stack(row, 1) for row in rows))


def evaluate(networks: NetworkStack, x: Tensor, test: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The mean of the exact slopes at x, and the test loss, in evaluation mode (S,) each."""
    networks.eval()
    f, z, _ = networks(x)
    (gradient,) = torch.autograd.grad(f.sum(), z[0])  # the first weight is the identity
    with torch.no_grad():
        far = (networks(test[0])[0] - test[1]).square().mean(1) / 2
    networks.train()
    return gradient.norm(dim=2).mean(1), far


def optimizer_of(name: str, networks: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Makes the optimizer of a variant."""
    ways: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(networks.parameters(), lr),
        "momentum": lambda: torch.optim.SGD(networks.parameters(), lr, momentum=0.9),
        "adam": lambda: torch.optim.Adam(networks.parameters(), lr),
        "adamw": lambda: torch.optim.AdamW(networks.parameters(), lr, weight_decay=0.01),
    }
    return ways[name]()


def log_ratio(over: float, under: float) -> float:
    """log10 of a ratio; NaN if it is not positive."""
    return math.log10(over / under) if over > 0 and under > 0 else math.nan


def compute(
    settings_and_seeds: Sequence[tuple[Mapping[str, Any], int]], device: str, on_progress: OnProgress
) -> list[Outcome]:
    """All networks of a way at once: four frequencies for each seed, with the same points, first weights and order."""
    ways = list(dict.fromkeys(json.dumps(dict(settings), sort_keys=True) for settings, _ in settings_and_seeds))
    result: dict[int, Outcome] = {}
    for number, way in enumerate(ways):
        chosen = [
            i for i, (settings, _) in enumerate(settings_and_seeds) if json.dumps(dict(settings), sort_keys=True) == way
        ]
        seeds = [settings_and_seeds[i][1] for i in chosen]

        def on_fraction(fraction: float, number: int = number) -> None:
            on_progress((number + fraction) / len(ways))

        trained = trajectories(settings_and_seeds[chosen[0]][0], seeds, on_fraction)
        for row, i in enumerate(chosen):
            four = slice(len(FREQUENCIES) * row, len(FREQUENCIES) * (row + 1))
            result[i] = outcome(
                {name: curve[four].numpy() for name, curve in vars(trained).items()}, settings_and_seeds[i][0]["steps"]
            )
    return [result[i] for i in range(len(settings_and_seeds))]


def trajectories(settings: Mapping[str, Any], seeds: Sequence[int], on_progress: OnProgress) -> Trajectories:
    """Trains the networks of all seeds and frequencies together."""
    drawn = [points(omega, seed, settings["points"], settings["test"]) for seed in seeds for omega in FREQUENCIES]
    x, y, x_test, y_test = (torch.stack(tensors) for tensors in zip(*drawn))
    networks = NetworkStack(
        [seed for seed in seeds for _ in FREQUENCIES], settings["widths"], settings["normalization"]
    )
    return train(
        networks,
        optimizer_of(settings["optimizer"], networks, settings["lr"]),
        (x, y),
        (x_test, y_test),
        steps=settings["steps"],
        batch=settings["batch"],
        windows=100,
        progress=on_progress,
    )


def outcome(curves: Mapping[str, np.ndarray[Any, Any]], steps: int) -> Outcome:
    """From the curves (4, T) of one seed's four frequencies."""
    count = curves["bias"].shape[1]
    last = max(1, count // 20)
    ends = {name: curve[:, -last:].mean(1) for name, curve in curves.items()}
    bias, weights = ends["bias"], ends["weights"]
    values = {
        "bias_order": _rank(FREQUENCIES, bias),
        "weight_order": _rank(FREQUENCIES, weights),
        "bias_ratio": log_ratio(bias[-1], bias[0]),
        "weight_ratio": log_ratio(weights[-1], weights[0]),
        "agree": _rank(bias, weights),
        "exact": float(np.mean([log_ratio(a, b) for a, b in zip(bias, ends["slope"])])),
        "test_order": _rank(bias, ends["test"]),
        "loss": float(ends["loss"].max()),
    }
    detail: dict[str, Any] = {"steps": thinned(np.linspace(0, steps, count + 1)[1:])}
    detail |= {name: [thinned(curve) for curve in curves[name]] for name in ("bias", "weights", "slope", "loss")}
    flags = () if values["loss"] < FIT else (f"training loss {values['loss']:.2g} at the highest, above {FIT}",)
    return Outcome(values, detail, flags)


def _rank(a: Sequence[float] | np.ndarray[Any, Any], b: Sequence[float] | np.ndarray[Any, Any]) -> float:
    return float(stats.spearmanr(a, b).statistic)


_QUESTION = (
    "what is the effect of optimization algorithms and of batching on the connection between complexity and training behavior? Does layer "
    "normalization play a role? What can be glimpsed by the trajectory of other parameters?"
)


def _claim_of(text: str, way: str, name: str, measure: str, above: float = 0.0) -> Claim:
    return Claim(
        f"{way}: {text}", _SOURCE, measure, (way,), lambda n: float(getattr(n[way], name)), above=above
    ).quoting(_QUESTION, "ours")


def _coupled(n: Mapping[str, VariantResult]) -> float:
    return abs(float(n[BATCH].exact)) - abs(float(n[SGD].exact))


def claims(scale: WaysScale) -> list[Claim]:
    """Claims of the paper, as numbers to check."""
    return [
        *(_claim_of("the bias's trajectory is longer at the highest frequency", way, "bias_ratio",
               "normalized update at the end, log10 of the ratio of ω = 1 to ω = 0.25") for way in WAYS),
        *(_claim_of("the bias's trajectory orders the four functions", way, "bias_order",
               "rank correlation of normalized update and frequency", 0.5) for way in WAYS),
        *(_claim_of("the weights' trajectory is longer at the highest frequency", way, "weight_ratio",
               "normalized update of all weights, log10 of the ratio of ω = 1 to ω = 0.25") for way in WAYS),
        *(_claim_of("trajectories of weights and of the bias agree", way, "agree",
               "rank correlation of the two over frequencies", 0.5) for way in WAYS),
        Claim("batch normalization takes the normalized update away from the exact slope", "not in the paper: the ratio is per sample",
              "size of log10 of update over exact slope, batch normalization minus SGD", (SGD, BATCH), _coupled, above=0.0),
    ]  # fmt: skip


def draw(
    study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
) -> dict[str, tuple[str, Figure]]:
    """One column per way of training; rows: update of the bias with the exact slope, update of the weights."""
    from matplotlib.figure import Figure

    colours = (COLOURS[2], COLOURS[6], COLOURS[5], COLOURS[1])  # cold to warm
    figure = Figure(figsize=(1.75 * len(details) + 0.7, 4.8), layout="constrained")
    axes = figure.subplots(2, len(details), squeeze=False, sharex=True)
    for column, (way, repeats) in enumerate(details.items()):
        at = np.array(repeats[0]["steps"]) / 1000
        for k, omega in enumerate(FREQUENCIES):
            for row, name in enumerate(("bias", "weights")):
                curves = np.array([repeat[name][k] for repeat in repeats])
                axes[row, column].plot(at, curves.mean(0), color=colours[k], linewidth=1.8, label=f"ω = {omega:g}")
                axes[row, column].fill_between(
                    at, curves.min(0), curves.max(0), color=colours[k], alpha=0.12, linewidth=0
                )
            slope = np.array([repeat["slope"][k] for repeat in repeats]).mean(0)
            axes[0, column].plot(
                at, slope, color="black", linewidth=0.8, linestyle=":", label="exact slope" if k == 0 else None
            )
        axes[0, column].set_title(way.replace(", ", ",\n"), fontsize=9)
        axes[1, column].set_xlabel("step, thousands")
        for axis in axes[:, column]:
            axis.grid(alpha=0.3)
            axis.set_yscale("log")
            plain_ticks(axis.yaxis, *axis.get_ylim())
    axes[0, 0].set_ylabel("normalized update\nof the first bias")
    axes[1, 0].set_ylabel("normalized update\nof all weights")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9, frameon=False
    )
    count = max(len(detail) for detail in details.values())
    figure.suptitle(f"{study.title}\nlines: means over {count} repeats, bands: lowest to highest", fontsize=12)
    return {
        "figure": (
            f"{study.title}: normalized updates of bias and weights by frequency, one column per way of training",
            figure,
        )
    }


STUDY = Study(
    "optimizers",
    "Trajectories under other optimizers and normalizations",
    "no figure: questions asked in the conclusion of What Training Reveals about Neural Network Complexity",
    "The task of `frequency`; networks 10-10-32-32-32-1, batches of ten",
    Computed(
        Jointly(compute),
        {
            "bias_order": ("bias: order", "{:.2f}"),
            "bias_ratio": ("ω = 1 to 0.25, log10", "{:.2f}"),
            "weight_order": ("weights: order", "{:.2f}"),
            "weight_ratio": ("ω = 1 to 0.25, log10", "{:.2f}"),
            "agree": ("weights and bias agree", "{:.2f}"),
            "exact": ("update over exact slope, log10", "{:.3f}"),
            "test_order": ("bias and test loss", "{:.2f}"),
            "loss": ("largest training loss", "{:.4f}"),
        },
        draw,
        "One colour per frequency; lines are means over repeats, bands show their range. Dotted: the exact mean slope\n"
        "at the training points in evaluation mode, which the update of the bias should show. *All weights*: √Σ‖dL/dW‖² / |dL/df| of\n"
        "a sample, over the layers after the first.",
        "Means over repeats, with the range, over the last twentieth of the steps. *Order*: rank correlation with the frequency over\n"
        "the four functions, 1 if they are in order. *Agree*: rank correlation of the two. *Bias and test loss*: rank correlation.\n"
        f"*Trusted*: repeats in which all four functions were fitted to a training loss below {FIT}.",
        (
            "Learning rates: SGD 0.01, momentum 0.9 with 0.001, Adam and AdamW (decay 0.01) 0.001; half squared error, float32.",
            "Normalizations stand before the ReLU of the three hidden layers of 32, with trained scale and shift.",
        ),
    ),
    SCALES,
    variants,
    claims,
    (
        "Networks of a seed share points, first weights and the order of points over frequencies and ways.",
        "Functions must have been fitted before trajectories compare them: a steep function has a short trajectory as long as little of "
        "it is learned (SGD after 500 epochs at learning rate 0.01 has the four in the wrong order).",
    ),
    asks="other optimizers and norms",
    seconds={"quick": 90},
    sources=("reveals:conclusion",),
)
