"""Lemma 1, Theorem 1, Corollaries 1 to 3 and Lemma 6 of *What training reveals* over random trainings, against exact constants.

    python -m benchmarks.truth_trajectory [--runs 40] [--steps 1500] [--seed 0]

Small ReLU networks in float64 by plain SGD at batch size one, written out in numpy: what the bias really did, the exact
gradient with respect to the input, exact singular values. Prints violations and tightness (bound over truth), and how often
the statements fail as they are printed.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from excite.bounds import (
    Bound,
    bias_distance,
    bias_variance,
    first_layer_lipschitz,
    steadiness,
    steady_lipschitz,
    trajectory_length,
)
from excite.monitor.watch import watch
from excite.probes import Every, Trajectory

SLACK = 1e-9


@dataclass(frozen=True)
class Setting:
    widths: tuple[int, ...]
    points: int
    loss: str = "squared"  # or "bce": sigmoid output, labels 0 and 1
    fixed: bool = False  # the first weight is the identity and stays it
    unit: bool = False  # inputs on the unit circle, evenly


SETTINGS = (
    Setting((3, 8, 6, 1), 20),
    Setting((6, 4, 5, 1), 20),
    Setting((5, 5, 8, 8, 1), 20, fixed=True),
    Setting((4, 7, 1), 20, loss="bce"),
    Setting((5, 5, 6, 1), 20, loss="bce", fixed=True),
    Setting((2, 6, 5, 1), 24, unit=True),
)


@dataclass
class Run:
    """One training: everything that happened, step by step."""

    setting: Setting
    rate: float
    moved: list[float] = field(default_factory=list)  # ‖bᵗ⁺¹ − bᵗ‖
    errors: list[float] = field(default_factory=list)
    steep: list[float] = field(
        default_factory=list
    )  # λ at the sample drawn, from the gradient with respect to the input
    largest: list[float] = field(default_factory=list)
    active: list[float] = field(default_factory=list)  # σ_min of the active rows
    printed: list[float] = field(default_factory=list)  # σ_n(W₁), as the paper has it
    biases: list[np.ndarray] = field(default_factory=list)
    everywhere: list[float] = field(default_factory=list)  # the largest λ over all training points
    second: list[tuple[float, float]] = field(default_factory=list)  # ‖ΔW₂‖₂, ‖Δb₂‖
    drawn: list[int] = field(default_factory=list)
    firsts: list[np.ndarray] = field(default_factory=list)  # W₁
    product: float = 0.0

    @property
    def updates(self) -> np.ndarray:
        return np.array(self.moved) / self.rate / np.array(self.errors)


def forward(weights: list[np.ndarray], biases: list[np.ndarray], x: np.ndarray) -> list[np.ndarray]:
    """Pre-activations of every layer, for x (N, n)."""
    z = []
    for j, (w, b) in enumerate(zip(weights, biases)):
        z.append((x if j == 0 else np.maximum(z[-1], 0)) @ w.T + b)
    return z


def slopes(weights: list[np.ndarray], z: list[np.ndarray], sigmoid: bool) -> np.ndarray:
    """∂f/∂z₁ (N, n₁)."""
    p = 1 / (1 + np.exp(-z[-1]))
    back = p * (1 - p) if sigmoid else np.ones_like(z[-1])
    for j in range(len(weights) - 1, 0, -1):
        back = (back @ weights[j]) * (z[j - 1] > 0)
    return back


def train(setting: Setting, steps: int, seed: int) -> Run:
    rng = np.random.default_rng(seed)
    n, count, sigmoid = setting.widths[0], setting.points, setting.loss == "bce"
    if setting.unit:
        angle = 2 * np.pi * np.arange(count) / count
        x = np.stack([np.cos(angle), np.sin(angle)], 1)
    else:
        x = rng.normal(size=(count, n))
    y = (rng.random(count) < 0.5).astype(float) if sigmoid else np.sin(2 * x[:, 0]) + x[:, -1]
    shapes = list(zip(setting.widths[1:], setting.widths[:-1]))
    weights = [rng.normal(size=s) * math.sqrt(2 / s[1]) for s in shapes]
    biases = [rng.normal(size=s[0]) * 0.1 for s in shapes]
    if setting.fixed:
        weights[0] = np.eye(n)
    run = Run(setting, 10 ** rng.uniform(-2.5, -1.5))
    run.biases.append(biases[0].copy())
    for _ in range(steps):
        z = forward(weights, biases, x)
        through = slopes(weights, z, sigmoid)
        run.everywhere.append(float(np.linalg.norm(through @ weights[0], axis=1).max()))
        i = int(rng.integers(count))
        run.drawn.append(i)
        f = 1 / (1 + math.exp(-z[-1][i, 0])) if sigmoid else z[-1][i, 0]
        error = 1 / (1 - y[i] - f) if sigmoid else f - y[i]  # dL/df; for hard labels
        derivative = f - y[i]  # dL/dz of the last layer, in both cases
        run.errors.append(abs(error))
        run.steep.append(float(np.linalg.norm(through[i] @ weights[0])))
        values = np.linalg.svd(weights[0], compute_uv=False)
        run.largest.append(float(values[0]))
        run.printed.append(float(values[-1]))
        on = z[0][i] > 0
        few = 0 < on.sum() <= n
        run.active.append(float(np.linalg.svd(weights[0][on], compute_uv=False)[-1]) if few else 0.0)
        before = [weights[1].copy(), biases[1].copy()] if len(weights) > 1 else None
        back = np.array([derivative])
        for j in range(len(weights) - 1, -1, -1):
            inner = x[i] if j == 0 else np.maximum(z[j - 1][i], 0)
            gradient = np.outer(back, inner)
            following = (weights[j].T @ back) * (z[j - 1][i] > 0) if j else None
            if j or not setting.fixed:
                weights[j] = weights[j] - run.rate * gradient
            biases[j] = biases[j] - run.rate * back
            back = following
        run.moved.append(float(np.linalg.norm(biases[0] - run.biases[-1])))
        run.biases.append(biases[0].copy())
        if before is not None:
            run.second.append((np.linalg.norm(weights[1] - before[0], 2), np.linalg.norm(biases[1] - before[1])))
        run.firsts.append(weights[0])
    run.product = math.prod(float(np.linalg.norm(w, 2)) for w in weights) * (0.25 if sigmoid else 1)
    return run


@dataclass
class Row:
    """One statement: how often it was given and violated, and bound over truth (truth over bound for lower bounds)."""

    given: int = 0
    violated: int = 0
    nothing: int = 0  # infinite upper or zero lower bounds
    ratios: list[float] = field(default_factory=list)

    def add(self, over: float, under: float) -> None:
        self.given += 1
        self.violated += over < under * (1 - SLACK) - 1e-13
        if math.isinf(over) or under == 0:
            self.nothing += 1
        else:
            self.ratios.append(over / under)

    def line(self, name: str) -> str:
        if not self.ratios:
            return f"| {name} | {self.given} | {self.violated} | {self.nothing} | | |"
        low, middle, high = np.quantile(self.ratios, [0, 0.5, 1])
        return f"| {name} | {self.given} | {self.violated} | {self.nothing} | {middle:.3g} | {low:.3g} to {high:.3g} |"


def compare(runs: list[Run], window: int = 100) -> dict[str, Row]:
    rows: dict[str, Row] = {}

    def add(name: str, over: float, under: float) -> None:
        rows.setdefault(name, Row()).add(over, under)

    def bound(name: str, one: Bound, truth: float) -> None:
        if one.value is not None:
            add(name, *((one.value, truth) if one.side == "upper" else (truth, one.value)))

    for run in runs:
        r, steep, top = run.updates, np.array(run.steep), np.array(run.largest)
        low, printed, rate = np.array(run.active), np.array(run.printed), run.rate
        for t in range(len(r)):
            add("Lemma 1, upper half, every step", r[t] * top[t], steep[t])
            add("Lemma 1, lower half, active rows, every step", steep[t], r[t] * low[t])
            add("printed: Lemma 1, lower half", steep[t], r[t] * printed[t])
        length = float(r.sum())
        below, above = trajectory_length(steep, top, low, r)
        bound("Theorem 1, from below", below, length)
        bound("Theorem 1, from above", above, length)
        phi = steadiness(r)
        one = steady_lipschitz(r, float(top[phi.tau :].max()), run.setting.points, tau=phi.tau, product=run.product)
        if one.value is not None:
            after = np.array(run.everywhere)[-int(one.terms["steps"]) :]
            bound("Corollary 1, at the last step", one, run.everywhere[-1])
            add(
                "Corollary 1, share of steps that hold against the share promised",
                float((after <= one.value).mean()),
                one.terms["share"],
            )
            add("product of norms, at the last step", run.product, run.everywhere[-1])
        for start in range(0, len(r) - window + 1, window):
            part = slice(start, start + window)
            iterates = np.stack(run.biases[start : start + window + 1])
            variance = float(((iterates - iterates.mean(0)) ** 2).sum(1).mean())
            for form in ("tight", "stated"):
                found = bias_variance(rate, run.errors[part], steep[part], top[part], form=form)
                bound(f"Corollary 2, {form}, windows of {window}", found, variance)
        for start in range(0, len(r) - 2, 2):
            iterates = np.stack(run.biases[start : start + 3])
            short = bias_variance(rate, run.errors[start : start + 2], steep[start : start + 2], top[start : start + 2])
            bound("Corollary 2, tight, windows of 2", short, float(((iterates - iterates.mean(0)) ** 2).sum(1).mean()))
            two = iterates[:2]
            speed = float((rate * steep[start : start + 2] / top[start : start + 2]).mean())
            harmonic = 2 / float((1 / np.array(run.errors[start : start + 2]) ** 2).sum())
            add(
                "printed: Corollary 2, windows of 2",
                float(((two - two.mean(0)) ** 2).sum(1).mean()),
                speed**2 * harmonic / 4,
            )
        far = float(np.linalg.norm(run.biases[-1] - run.biases[0]))
        three = bias_distance(rate, run.errors, steep, low, updates=r)
        bound("Corollary 3, active rows", three, far)
        add("Corollary 3, the path itself", three.terms["path"], far)
        with np.errstate(divide="ignore"):
            add("printed: Corollary 3", float((rate * np.array(run.errors) * steep / printed).sum()), far)
        if run.setting.unit:
            _first_layer(run, add, bound)
    return rows


def _first_layer(run: Run, add, bound) -> None:
    half = len(run.second) // 2
    weight, bias = np.array(run.second[half:]).T
    offsets = np.linalg.norm(np.stack(run.biases[half:-1]), axis=1)
    beta = max(float(np.linalg.norm(run.firsts[-1] - w, 2)) for w in run.firsts[half:])  # for the last step
    delta = 2 * math.sin(math.pi / run.setting.points / 2)
    six = first_layer_lipschitz(
        weight, bias, offsets, beta, delta, unit=True, sgd=True, drawn=run.drawn[half:], points=run.setting.points
    )
    truth = first_layer_truth(run.firsts[-1], run.biases[-1])
    bound("Lemma 6, second bias and √2", six, truth)
    add("Lemma 6 without √2", six.terms["gain"], truth)
    moved = np.array(run.moved[half:])
    fine = moved > 0
    theta = float((weight[fine] / moved[fine] + offsets[fine]).max())
    add("printed: Lemma 6, first bias", (theta + beta) / (1 - delta), truth)


def first_layer_truth(weight: np.ndarray, bias: np.ndarray) -> float:
    """The Lipschitz constant of (Wx + b)₊ in the plane: the largest ‖S W‖ over patterns, one point in each region."""
    rng = np.random.default_rng(0)
    points = rng.normal(size=(20000, 2)) * 10 ** rng.uniform(-2, 3, size=(20000, 1))
    patterns = np.unique(points @ weight.T + bias > 0, axis=0)
    return max(float(np.linalg.norm(weight * on[:, None], 2)) for on in patterns)


def watched(steps: int, seed: int) -> tuple[int, int]:
    """Samples and violations of Lemma 1 that the probe itself counts, looking at every step, for a convolutional network."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1)
    ).double()  # fmt: skip
    x = torch.randn(32, 2, 8, 8, dtype=torch.float64)
    y = x[:, 0].mean((1, 2)).mul(8).sin()[:, None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    counts = [0, 0]
    probe = Trajectory(Every(1), bounds_every=1)
    measure = probe.measure

    def counted(now):  # type: ignore[no-untyped-def]
        values = measure(now)
        counts[0] += int(values.get("samples/0", 0))
        counts[1] += int(values.get("violations/0", 0))
        return values

    probe.measure = counted  # type: ignore[method-assign]
    with watch(model, example=x, probes=[probe], strict=True) as looking:
        for step in range(steps):
            part = slice(8 * (step % 4), 8 * (step % 4) + 8)
            optimizer.zero_grad()
            loss = (model(x[part]) - y[part]).square().mean()
            loss.backward()
            optimizer.step()
            looking.step(loss)
    return counts[0], counts[1]


def report(rows: dict[str, Row]) -> str:
    lines = [
        "| statement | checked | violated | says nothing | bound / truth, median | range |",
        "|---|---|---|---|---|---|",
    ]
    ordered = sorted(rows, key=lambda name: (name.startswith("printed"), name))
    return "\n".join([*lines, *(rows[name].line(name) for name in ordered)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40, help="trainings of each of the settings")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = [train(s, options.steps, options.seed + i) for s in SETTINGS for i in range(options.runs)]
    print(
        f"{len(runs)} trainings of {options.steps} steps, float64, SGD at batch size one\n\n{report(compare(runs))}\n"
    )
    samples, bad = watched(200, options.seed)
    print(
        f"The probe on a convolutional network, momentum, batches of 8: {samples} samples, {bad} violations of Lemma 1."
    )


if __name__ == "__main__":
    main()
