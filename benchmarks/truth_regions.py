"""Theorems 2 and 3 of "What training reveals" over random trainings, against exact slopes.

    python -m benchmarks.truth_regions [--trainings 60] [--dropout 40]

Small ReLU networks are trained by SGD, one point per step, on squared error or, with a sigmoid, on cross-entropy. φ is what
the theory says: the distance that the first bias moved, over the learning rate and the derivative of the loss, taken when each
training point was met last; so slopes have changed since by a factor 1 + γ, which is measured. Truth is the exact local
constant at random new points (with a sigmoid: ¼ of the slope before it, the most it can be in the region). Ratios are bound
over truth in regions without training points.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from excite.bounds import dropout_generalization, empty_region
from excite.bounds.relu_network import relu_network
from excite.bounds.trajectory.dropout import DropoutStatement
from excite.bounds.trajectory.patterns import patterns, slopes
from excite.train import train_with_dropout

SLACK = 1e-9
Pairs = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Trained:
    pairs: Pairs
    x: Tensor
    y: Tensor
    phi: Tensor  # (N,) of the last visit
    beta: float  # largest σ₁(W₁) since
    sigmoid: bool


def weights(widths: tuple[int, ...], draws: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    return [
        (draws.uniform(-1, 1, (m, n)) * math.sqrt(3 / n), draws.uniform(-1, 1, m) / math.sqrt(n))
        for n, m in pairwise(widths)
    ]


def points(count: int, size: int, draws: np.random.Generator, sigmoid: bool) -> tuple[np.ndarray, np.ndarray]:
    x = draws.normal(size=(count, size))
    wave = np.cos(1.5 * x[:, 0]) * np.cos(x[:, -1])
    return x, (wave > 0.4).astype(float) if sigmoid else wave


def train(widths: tuple[int, ...], sigmoid: bool, seed: int, count: int = 60, steps: int = 4000) -> Trained:
    """SGD with a learning rate that falls to a hundredth; b₁ is compared before and after each step."""
    draws = np.random.default_rng(seed)
    x, y = points(count, widths[0], draws, sigmoid)
    layers = weights(widths, draws)
    phi, beta = np.zeros(count), 0.0
    order = np.concatenate(
        [draws.integers(0, count, steps), draws.permutation(count)]
    )  # at the end every point once more
    for t, i in enumerate(order):
        rate = 0.05 * 0.01 ** min(1.0, t / steps)
        inputs = [x[i]]
        for weight, bias in layers[:-1]:
            inputs.append(np.maximum(weight @ inputs[-1] + bias, 0))
        z = float((layers[-1][0] @ inputs[-1] + layers[-1][1])[0])
        f = 1 / (1 + math.exp(-z)) if sigmoid else z
        loss_slope = f - y[i] if not sigmoid else (f - y[i]) / (f * (1 - f))  # dℓ/df
        back = np.array([f - y[i]])  # dℓ/dz
        before = layers[0][1].copy()
        for j in range(len(layers) - 1, -1, -1):
            weight, bias = layers[j]
            through = (weight.T @ back) * (inputs[j] > 0) if j else back
            weight -= rate * np.outer(back, inputs[j])
            bias -= rate * back
            back = through
        if t >= steps and loss_slope:
            phi[i] = np.linalg.norm(layers[0][1] - before) / (rate * abs(loss_slope))
            beta = max(beta, float(np.linalg.norm(layers[0][0], 2)))
    pairs = [(torch.from_numpy(weight), torch.from_numpy(bias)) for weight, bias in layers]
    return Trained(pairs, torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(phi), beta, sigmoid)


def steepest(pairs: Pairs, new: Tensor, sigmoid: bool) -> Tensor:
    """The largest slope in the region of each point: with a sigmoid up to ¼ of the slope before it."""
    network = relu_network(pairs, new)
    return slopes(network, patterns(network, new))[1] * (0.25 if sigmoid else 1.0)


@dataclass
class Row:
    bounds: int = 0
    violated: int = 0
    reached: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    gammas: list[float] = field(default_factory=list)

    def add(self, values: Tensor, truth: Tensor, empty: Tensor, reached: Tensor, gamma: float) -> None:
        self.bounds += int(reached.sum())
        self.violated += int((values[reached] < truth[reached] * (1 - SLACK) - 1e-14).sum())
        some = reached & empty & (truth > 1e-12)
        self.ratios += (values[some] / truth[some]).tolist()
        if bool(empty.any()):
            self.reached.append(float(reached[empty].double().mean()))
        self.gammas.append(gamma)

    def line(self, name: str) -> str:
        low, middle, high = np.quantile(self.ratios, [0, 0.5, 1]) if self.ratios else (math.nan,) * 3
        return (
            f"| {name} | {len(self.gammas)} | {self.bounds} | {self.violated} | {np.mean(self.reached):.1%} | "
            f"{middle:.3g} | {low:.3g} to {high:.3g} | {np.median(self.gammas):.3g} |"
        )


SETTINGS = tuple(
    (widths, sigmoid) for sigmoid in (False, True) for widths in ((2, 12, 1), (2, 6, 6, 1), (3, 5, 5, 4, 1))
)


def theorem2(trainings: int, seed: int = 0, new: int = 400, steps: int = 4000) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for number in range(trainings):
        widths, sigmoid = SETTINGS[number % len(SETTINGS)]
        one = train(widths, sigmoid, seed + number, steps=steps)
        at = torch.from_numpy(1.5 * np.random.default_rng(10_000 + number).normal(size=(new, widths[0])))
        truth = steepest(one.pairs, at, sigmoid)
        net = relu_network(one.pairs, one.x)
        exact = slopes(net, patterns(net, one.x))[1]
        if sigmoid:
            f = net.signals(one.x)[-1][:, 0].sigmoid()
            exact = exact * f * (1 - f)
        what = ("sigmoid" if sigmoid else "regression") + f", depth {len(widths) - 1}"
        ways = {
            "φ of the run": {"phi": one.phi, "beta": one.beta},
            "φ of the network": {"phi": None},
            "exact constants at training points (figure 6)": {"phi": exact, "beta": 1.0},
        }
        if sigmoid:
            ways["φ of the network, ξ of each point"] = {"phi": None, "form": "point"}
        for way, settings in ways.items():
            found = empty_region(one.pairs, one.x, settings.pop("phi"), at, sigmoid=sigmoid, **settings)  # type: ignore[arg-type]
            rows.setdefault(f"{what}: {way}", Row()).add(
                found.values, truth, found.empty, found.reached, found.terms["gamma"]
            )
    return rows


DROPOUT = tuple(
    (widths, where, noise)
    for widths in ((2, 4, 1), (2, 16, 1), (2, 6, 6, 1), (2, 4, 4, 4, 1))
    for where in ("end", "forward")
    for noise in (0.0, 0.5)
)


def dropout(trainings: int, seed: int = 0, steps: int = 6000) -> list[tuple[str, DropoutStatement, Tensor]]:
    """Statements, and the exact largest slopes at the points they were asked about; noise 0.5: labels say nothing."""
    found = []
    for number in range(trainings):
        widths, where, noise = DROPOUT[number % len(DROPOUT)]
        draws = np.random.default_rng(seed + number)
        y = draws.integers(0, 2, 100)
        x = torch.from_numpy(0.5 * draws.normal(size=(100, 2)) + (2 * y[:, None] - 1))
        y = np.where(draws.random(100) < 2 * noise, draws.integers(0, 2, 100), y)
        pairs = [(torch.from_numpy(w), torch.from_numpy(b)) for w, b in weights(widths, draws)]
        labels = torch.from_numpy(y)
        run = train_with_dropout(pairs, x, labels, steps, 0.02, where=where, decay=0.01, tail=2000, seed=number)  # type: ignore[arg-type]
        new = torch.from_numpy(1.5 * draws.normal(size=(300, 2)))
        name = f"{'-'.join(map(str, widths))}, dropped {'at the end' if where == 'end' else 'in the pass'}, " + (
            "random labels" if noise else "two clouds"
        )
        found.append((name, dropout_generalization(run, x, new), steepest(list(run.pairs), new, True)))
    return found


def summary(found: list[tuple[str, DropoutStatement, Tensor]]) -> str:
    lines = [
        "| network | trainings | λ_steady above all found | λ_steady / found, median | product / found, median | "
        "program: reached | violated | program / truth, median | p_min, median | μ, median | Lemma 4, least, with λ_steady | with the product | with the largest found |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(name for name, _, _ in found):
        mine = [(one, truth) for other, one, truth in found if other == name]
        above = sum(one.steady >= one.found * (1 - SLACK) for one, _ in mine)
        violated, ratios = 0, []
        for one, truth in mine:
            reached = one.program.reached
            violated += int((one.program.values[reached] < truth[reached] * (1 - SLACK) - 1e-14).sum())
            some = reached & (truth > 1e-12)
            ratios += (one.program.values[some] / truth[some]).tolist()
        least = [min(bounds) for bounds in zip(*([g.bounds[0] for g in one.lemma4.values()] for one, _ in mine))]
        lines.append(
            f"| {name} | {len(mine)} | {above} | {np.median([one.steady / one.found for one, _ in mine]):.3g} | "
            f"{np.median([one.product / one.found for one, _ in mine]):.3g} | {np.mean([one.program.share for one, _ in mine]):.1%} | "
            f"{violated} | {np.median(ratios):.3g} | {np.median([one.terms['p_min'] for one, _ in mine]):.2g} | "
            f"{np.median([one.terms['mu'] for one, _ in mine]):.2g} | {' | '.join(f'{value:.2g}' for value in least)} |"
        )
    above = sum(one.steady >= one.found * (1 - SLACK) for _, one, _ in found)
    usable = [one for _, one, _ in found if math.isfinite(one.steady)]
    below = sum(one.steady <= one.product for one in usable)
    lines.append(
        f"\nλ_steady is above every local constant found in {above} of {len(found)} trainings; it is finite in {len(usable)}, "
        f"and below the product of norms, which always holds, in {below}."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", type=int, default=60)
    parser.add_argument("--dropout", type=int, default=48)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = theorem2(options.trainings)
    print("## Theorem 2: empty regions\n")
    print("| | trainings | bounds | violated | empty regions reached | bound / truth, median | range | γ, median |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(rows[name].line(name) for name in rows), flush=True)
    print("\n## Theorem 3: dropout\n")
    print(summary(dropout(options.dropout)))


if __name__ == "__main__":
    main()
