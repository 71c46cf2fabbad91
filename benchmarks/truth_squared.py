"""The bounds for squared error against the truth, over many trainings to convergence.

    python -m benchmarks.truth_squared [--trainings 200] [--steps 20000] [--seed 0]

Trains at least so many small ReLU networks by gradient descent on ½ Σ (f − y)², of different widths, depths, step sizes,
momenta and data, until the gradient vanishes. Every bound whose assumptions hold is compared with what it bounds, exact in
up to three dimensions for two layers (all activation patterns are listed) and found by search for deeper networks. Prints
a table in Markdown: how many bounds were given, how many violated, how tight.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from excite.bounds import Bound, Descent, deep_lipschitz, deep_norms, two_layer_lipschitz, two_layer_margin

TOGETHER = 32  # networks of one setting, trained side by side
SLACK = 1e-9  # relative: what rounding may do to a bound that is met with equality
Pairs = list[tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Setting:
    """Networks of one shape: widths from input to output, number of points, whether layers have biases, and the data."""

    widths: tuple[int, ...]
    points: int
    bias: bool
    data: str  # "teacher": values of a random network of the same kind; "noisy": with noise; "classes": two clusters


SETTINGS = (
    Setting((1, 2, 1), 12, True, "noisy"),
    Setting((1, 4, 1), 24, True, "noisy"),
    Setting((2, 2, 1), 24, True, "noisy"),
    Setting((2, 3, 1), 24, True, "teacher"),
    Setting((2, 4, 1), 32, True, "noisy"),
    Setting((2, 6, 1), 40, True, "teacher"),
    Setting((2, 3, 2), 24, True, "noisy"),
    Setting((3, 4, 1), 40, True, "noisy"),
    Setting((2, 3, 1), 16, True, "classes"),
    Setting((2, 5, 1), 24, True, "classes"),
    Setting((2, 4, 1), 24, False, "classes"),
    Setting((2, 3, 1), 24, False, "noisy"),
    Setting((2, 3, 3, 1), 40, False, "teacher"),
    Setting((2, 3, 2, 1), 40, False, "noisy"),
    Setting((2, 2, 2, 1), 40, True, "noisy"),
    Setting((2, 3, 3, 1), 60, True, "teacher"),
    Setting((2, 2, 2, 2, 1), 60, False, "noisy"),
    Setting((3, 3, 2, 2, 1), 60, True, "teacher"),
)


@dataclass
class Training:
    """One network after training, in float64."""

    setting: Setting
    pairs: Pairs
    x: Tensor
    y: Tensor
    descent: Descent


def forward(weights: list[Tensor], biases: list[Tensor] | None, x: Tensor) -> Tensor:
    """Many networks at once: weights (B, out, in), x (B, N, in)."""
    for j, weight in enumerate(weights):
        x = x @ weight.mT
        if biases is not None:
            x = x + biases[j][:, None]
        if j + 1 < len(weights):
            x = x.relu()
    return x


def initial(setting: Setting, count: int, generator: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
    shapes = list(zip(setting.widths[1:], setting.widths[:-1]))
    weights = [torch.randn(count, o, i, generator=generator, dtype=torch.float64) / math.sqrt(i) for o, i in shapes]
    biases = [torch.randn(count, o, generator=generator, dtype=torch.float64) / 2 for o, _ in shapes]
    return weights, biases


def data(setting: Setting, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """x (B, N, n), y (B, N, m), and weights and biases to start from.

    Where a network made the values, training starts at a distance from it that differs from network to network.
    """
    n, m = setting.widths[0], setting.widths[-1]
    x = torch.randn(count, setting.points, n, generator=generator, dtype=torch.float64)
    weights, biases = initial(setting, count, generator)
    others = initial(setting, count, generator)
    if setting.data == "classes":
        y = (torch.arange(setting.points) % 2).double()[None, :, None].expand(count, -1, 1).clone()
        direction = torch.randn(count, 1, n, generator=generator, dtype=torch.float64)
        direction = direction / direction.norm(dim=2, keepdim=True)
        return 0.7 * x + (2 * y - 1) * 1.5 * direction, y, weights, biases
    y = forward(weights, biases if setting.bias else None, x)
    if setting.data == "noisy":
        y = y + 0.1 * torch.randn(count, setting.points, m, generator=generator, dtype=torch.float64)
    far = torch.rand(count, generator=generator, dtype=torch.float64)
    starts = [
        [a + far.view(-1, *[1] * (a.dim() - 1)) * (b - a) for a, b in zip(*two)]
        for two in zip((weights, biases), others)
    ]
    return x, y, starts[0], starts[1]


def train(setting: Setting, count: int, steps: int, seed: int) -> list[Training]:
    """`count` networks at once, each with its own data, start and step size, by gradient descent until all have settled."""
    generator = torch.Generator().manual_seed(seed)
    x, y, weights, biases = data(setting, count, generator)
    parameters = [p.requires_grad_() for p in (*weights, *(biases if setting.bias else []))]
    choices = torch.randint(4, (count,), generator=generator)
    rules = [Descent(1.0, *((0.0, 0.0), (0.5, 0.0), (0.9, 0.0), (0.9, 0.9))[int(c)]) for c in choices]
    # Step sizes from a twentieth to two thirds of what a rough curvature allows.
    curvature = x.square().sum((1, 2)) + setting.points
    share = 10 ** (-1.3 + 1.1 * torch.rand(count, generator=generator, dtype=torch.float64))
    delta = share * torch.tensor([rule.limit for rule in rules], dtype=torch.float64) / curvature
    keep = torch.tensor([rule.momentum for rule in rules], dtype=torch.float64)
    take = delta * torch.tensor([1 - rule.dampening for rule in rules], dtype=torch.float64)
    speed = [torch.zeros_like(p) for p in parameters]
    shapes = [(-1, *[1] * (p.dim() - 1)) for p in parameters]
    for step in range(steps):
        output = forward(weights, biases if setting.bias else None, x)
        gradients = torch.autograd.grad((output - y).square().sum() / 2, parameters)
        with torch.no_grad():
            for p, g, s, shape in zip(parameters, gradients, speed, shapes):
                s.mul_(keep.view(shape)).addcmul_(g, take.view(shape))
                p.sub_(s)
        if step % 1000 == 999:
            norms = sum(g.flatten(1).square().sum(1) for g in gradients).sqrt()
            if bool((norms < 1e-9 * (1 + y.flatten(1).norm(dim=1))).all()):
                break
    layers = len(weights)
    found = []
    for i in range(count):
        pairs: Pairs = [
            (weights[j][i].detach().clone(), biases[j][i].detach().clone() if setting.bias else None)
            for j in range(layers)
        ]
        if all(bool(torch.isfinite(w).all()) for w, _ in pairs):
            rule = Descent(float(delta[i]), rules[i].momentum, rules[i].dampening)
            found.append(Training(setting, pairs, x[i], y[i], rule))
    return found


def patterns(V: np.ndarray, b: np.ndarray) -> np.ndarray:
    """All activation patterns (count, r) that some x has, for hyperplanes in general position in up to three dimensions.

    Every region of the arrangement has a corner, where n hyperplanes meet; around a corner all 2ⁿ signs of these occur, and
    the other units keep theirs.
    """
    size = np.linalg.norm(V, axis=1)
    V, b = V / size[:, None], b / size
    rank = np.linalg.matrix_rank(V, 1e-12)  # training can align units: what is parallel up to rounding is parallel
    V = V @ np.linalg.svd(V)[2][:rank].T  # what happens across the row space
    r, n = V.shape
    if r == n:
        return np.array(list(itertools.product([False, True], repeat=r)))
    found = set()
    for chosen in itertools.combinations(range(r), n):
        if np.linalg.cond(V[list(chosen)]) > 1e14:  # parallel: regions have other corners
            continue
        at = np.linalg.solve(V[list(chosen)], -b[list(chosen)])
        signs = V @ at + b > 0
        for around in itertools.product([False, True], repeat=n):
            signs[list(chosen)] = around
            found.add(tuple(signs.tolist()))
    return np.array(sorted(found))


def pieces(training: Training) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Patterns (P, r), slopes (P, m, n) and offsets (P, m) of all linear pieces of a two-layer network."""
    (V, b), (W, c) = [(w.numpy(), None if v is None else v.numpy()) for w, v in training.pairs]
    b = np.zeros(len(V)) if b is None else b
    c = np.zeros(len(W)) if c is None else c
    # Without biases all hyperplanes meet in the origin; then the regions are those met far away from it, on a sphere.
    on = patterns(V, b) if b.any() else _cones(V)
    return on, np.einsum("mk,pk,kn->pmn", W, on, V), np.einsum("mk,pk,k->pm", W, on, b) + c


def _cones(V: np.ndarray) -> np.ndarray:
    """Patterns of hyperplanes through the origin of the plane."""
    angles = np.sort((np.arctan2(V[:, 1], V[:, 0])[:, None] + [np.pi / 2, -np.pi / 2]).reshape(-1) % (2 * np.pi))
    middle = (angles + np.append(angles[1:], angles[0] + 2 * np.pi)) / 2
    return np.unique(np.stack([np.cos(middle), np.sin(middle)], 1) @ V.T > 0, axis=0)


def lipschitz(training: Training) -> float:
    """Exact for two layers in up to three dimensions, otherwise the largest slope found at many points."""
    if len(training.pairs) == 2:
        return float(np.linalg.norm(pieces(training)[1], 2, axis=(1, 2)).max())
    generator = torch.Generator().manual_seed(0)
    n = training.x.shape[1]
    spread = 10 ** (3 * torch.rand(20000, 1, generator=generator, dtype=torch.float64) - 1)
    x = torch.cat([training.x, spread * torch.randn(20000, n, generator=generator, dtype=torch.float64)])
    slope = torch.eye(n, dtype=torch.float64).expand(len(x), n, n)
    for j, (weight, bias) in enumerate(training.pairs):
        z = x @ weight.T + (0 if bias is None else bias)
        slope = weight @ slope
        if j + 1 < len(training.pairs):
            slope, x = slope * (z > 0)[:, :, None], z.relu()
    return float(torch.linalg.matrix_norm(slope, 2).max())


def margin(training: Training, threshold: float) -> float:
    """The exact smallest distance in the plane of a training point to a point where f = threshold.

    In each region f is linear: the nearest point on the part of the line f = threshold inside the region.
    """
    V, b = training.pairs[0][0].numpy(), training.pairs[0][1]
    b = np.zeros(len(V)) if b is None else b.numpy()
    smallest = math.inf
    for on, slope, offset in zip(*pieces(training)):
        a, rest = slope[0], threshold - offset[0]
        if not a.any():
            continue
        foot, along = a * rest / (a @ a), np.array([-a[1], a[0]]) / np.linalg.norm(a)
        sign = np.where(on, 1.0, -1.0)
        speed, height = sign * (V @ along), sign * (V @ foot + b)  # speed · t + height ≥ 0
        low = max([-math.inf, *(-height[speed > 0] / speed[speed > 0])])
        high = min([math.inf, *(-height[speed < 0] / speed[speed < 0])])
        if low > high or (height[speed == 0] < 0).any():
            continue
        x = training.x.numpy()
        t = np.clip((x - foot) @ along, low, high)
        smallest = min(smallest, float(np.linalg.norm(foot + t[:, None] * along - x, axis=1).min()))
    return smallest


@dataclass
class Row:
    """Counts for one bound: `ratios` are bound over truth (truth over bound for lower bounds), at least 1 unless violated."""

    given: int = 0
    violated: int = 0
    ratios: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)

    def add(self, bound: Bound, truth: float) -> None:
        if bound.value is None:
            self.failed.update([re.sub(r"layer \d", "a layer", a.text) for a in bound.failed][:1])
            return
        self.given += 1
        over, under = (bound.value, truth) if bound.side == "upper" else (truth, bound.value)
        ratio = over / under if under else math.inf
        self.violated += ratio < 1 - SLACK
        self.ratios.append(ratio)

    def line(self, name: str) -> str:
        total = self.given + sum(self.failed.values())
        if not self.ratios:
            return f"| {name} | {total} | 0 | 0 | | |"
        low, middle, high = np.quantile(self.ratios, [0, 0.5, 1])
        return f"| {name} | {total} | {self.given} | {self.violated} | {middle:.3g} | {low:.3g} to {high:.3g} |"


def converged(training: Training) -> bool:
    """The gradient has vanished, in the sense of the bounds, and something of the network is left."""
    last = deep_norms(training.pairs, training.x, training.y, training.descent)[-1]
    return bool(last.assumptions[0].held) and last.terms["sharpness"] > 0


def compare(trainings: list[Training]) -> dict[str, Row]:
    """Every bound on every training, with the step it was trained with and with the largest one it would survive."""
    rows: dict[str, Row] = {}

    def add(name: str, bound: Bound, truth: float) -> None:
        rows.setdefault(name, Row()).add(bound, truth)

    for one in trainings:
        steep = lipschitz(one)
        settled = deep_norms(one.pairs, one.x, one.y, one.descent)[0]
        allowed = Bound("stability", "λ_max", settled.terms["limit"], assumptions=settled.assumptions[:1])
        add("largest eigenvalue of the Hessian", allowed, settled.terms["sharpness"])
        for form in ("stated", "unit"):
            if len(one.pairs) == 2:
                bound = two_layer_lipschitz(one.pairs, one.x, one.y, one.descent, form=form)
                add(f"two layers, Lipschitz constant, {form}", bound, steep)
                largest = largest_step(one.descent, bound)
                tight = two_layer_lipschitz(one.pairs, one.x, one.y, largest, form=form)
                add(f"two layers, Lipschitz constant, {form}, at the largest step", tight, steep)
                if one.setting.data == "classes":
                    bound = two_layer_margin(one.pairs, one.x, one.y, one.descent, form=form)
                    add(f"two layers, margin, {form}", bound, margin(one, bound.terms["threshold"]))
            else:
                bound = deep_lipschitz(one.pairs, one.x, one.y, one.descent, form=form)
                add(f"deep, Lipschitz constant, {form}", bound, steep)
                largest = largest_step(one.descent, bound)
                tight = deep_lipschitz(one.pairs, one.x, one.y, largest, form=form)
                add(f"deep, Lipschitz constant, {form}, at the largest step", tight, steep)
            for layer in deep_norms(one.pairs, one.x, one.y, one.descent, form=form):
                add(f"norm of a weight matrix, {form}", layer, layer.terms["norm"])
    return rows


def largest_step(descent: Descent, bound: Bound) -> Descent:
    """The largest step at which gradient descent could have stayed where it is."""
    step = descent.step * bound.terms["limit"] / bound.terms["sharpness"] * (1 - 1e-6)
    return Descent(step, descent.momentum, descent.dampening)


def report(rows: dict[str, Row]) -> str:
    lines = ["| bound | trainings | given | violated | bound / truth, median | range |", "|---|---|---|---|---|---|"]
    lines += [rows[name].line(name) for name in sorted(rows)]
    return "\n".join(lines)


def collect(
    least: int, steps: int, seed: int, settings: tuple[Setting, ...] = SETTINGS, together: int = TOGETHER
) -> tuple[list[Training], int]:
    """At least so many trainings that converged, and how many were tried."""
    trainings: list[Training] = []
    tried = 0
    while len(trainings) < least:
        for setting in settings:
            trainings += [one for one in train(setting, together, steps, seed) if converged(one)]
            seed, tried = seed + 1, tried + together
    return trainings, tried


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", type=int, default=200, help="at least so many that converge")
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainings, tried = collect(options.trainings, options.steps, options.seed)
    rows = compare(trainings)
    print(f"{len(trainings)} of {tried} trainings converged in at most {options.steps} steps\n\n{report(rows)}\n")
    print(
        "For lower bounds the ratio is truth / bound. No bound is given where an assumption fails; the first that failed:\n"
    )
    for name in sorted(rows):
        for text, count in rows[name].failed.most_common():
            print(f"- {name}: {text}: {count}")


if __name__ == "__main__":
    main()
