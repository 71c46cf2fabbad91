"""Train a small ReLU classifier with ½-dropout, batch size one, and keep what theorems about such a training ask for.

Two ways to drop units, z_l ∈ {0, 1} drawn again at each step:

- "end", as "What training reveals" (section 5.2) defines it: a full forward pass decides which units are active, s_l; then
  units are dropped, S̃_l = z_l s_l, and f̃ = σ(W_d S̃_{d−1} (… S̃_1 (W_1 x + b_1) …) + b_d) is what is trained;
- "forward", as practice does it: units are dropped during the pass, h_l = 2 z_l (W_l h_{l−1} + b_l)_+, so that later layers decide
  after earlier ones have been dropped. There S̃_l = z_l 1[h_l > 0], and the factors of 2 are left out of φ below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from excite._core.checks import check_count, check_number, check_seed, check_tensor
from excite._core.compatibility import renamed_keywords
from excite.bounds.relu_network import Pairs, ReluNetwork, relu_network
from excite.bounds.trajectory.dropout import DropoutRun, Where
from excite.errors import InputError, TrainingStopped

Array = npt.NDArray[Any]


@renamed_keywords(looks="measurements")
def train_with_dropout(
    model: nn.Module | Pairs, x: Tensor, y: Tensor, steps: int, lr: float, *, where: Where = "end", tail: int =
    1000, decay: float = 1.0, measurements: int = 20, seed: int = 0, progress: Callable[[float], None] = lambda
    fraction: None,
) -> DropoutRun:  # fmt: skip
    """Trains with ½-dropout by SGD on the binary cross-entropy, one point per step.

    Args:
        model: Fully connected ReLU network with one output, with or without a sigmoid behind it; left unchanged.
        x: Points, (N, d).
        y: Labels in {0, 1}, (N,).
        steps: Number of steps.
        lr: Learning rate of the first step.
        where: "end": units are dropped after a full forward pass, as the paper defines it; "forward": during the pass.
        tail: Number of last steps that are kept.
        decay: Fraction of `lr` to which the learning rate falls, evenly on a logarithmic scale (Assumption 1).
        measurements: Number of measurements of all training points during the tail.
        seed: Seed of the order of the points and of the dropped units.
        progress: Called with the fraction of steps done.

    Returns:
        The trained network and what the theorems about dropout need.

    Raises:
        InputError: If an argument is invalid or the model is not such a network.
        TrainingStopped: If the output is not finite.

    Example:
        >>> run = train_with_dropout(model, x, y, steps=50, lr=0.1, tail=20)
        >>> run.phi.shape
        torch.Size([20])
    """
    learner = _Learner(relu_network(model, x, sigmoid=None), where)
    labels = _labels(y, len(x))
    steps, seed = check_count(steps, "steps"), check_seed(seed)
    measurements = check_count(measurements, "measurements")
    tail = check_count(tail, "tail", 1, steps)
    lr, decay = check_number(lr, "lr", 0, above=True), check_number(decay, "decay", 0, 1, above=True)
    points = x.detach().double().cpu().flatten(1).numpy()
    draws = np.random.default_rng(seed)
    order = draws.integers(0, len(points), steps)
    tau, often, rate = steps - tail, max(1, tail // measurements), lr
    last, watch = _Tail(tail, learner.widths), _Measurements()
    for t in range(steps):
        if t >= tau and (t - tau) % often == 0:
            watch.measure(learner.weights, learner.biases, points)
        masks = np.split(draws.random(sum(learner.widths)) < 0.5, learner.cuts)
        step = learner.learn(points[order[t]], labels[order[t]], masks, rate)
        if not math.isfinite(step.z):
            raise TrainingStopped(f"the output is not finite at step {t + 1}: lower lr")
        if t >= tau:
            last.put(t - tau, step)
        rate *= decay ** (1 / steps)
        if t % 1000 == 999:
            progress((t + 1) / steps)
    watch.measure(learner.weights, learner.biases, points)
    return DropoutRun(learner.pairs(), where, tau, *last.tensors(learner.cuts), **watch.result())


def _labels(y: Tensor, count: int) -> Array:
    check_tensor(y, "labels", floating=False)
    labels = y.detach().double().cpu().reshape(-1).numpy()
    if labels.shape != (count,) or not np.isin(labels, (0, 1)).all():
        raise InputError(f"expected labels 0 and 1, one for each of {count} points; got {tuple(y.shape)}")
    return np.asarray(labels)


@dataclass(frozen=True)
class _Step:
    """One step, before its update: units active and kept (Σ n_l,), the output before the sigmoid, ‖∂z/∂b₁‖ without the 2s."""

    active: Array
    z: float
    plain: float


class _Learner:
    """The weights, in double precision, and SGD on them."""

    def __init__(self, network: ReluNetwork, where: Where):
        if len(network.weights[-1]) != 1:
            raise InputError(f"expected a network with one output; this one has {len(network.weights[-1])}")
        if where not in ("end", "forward"):
            raise InputError(f"expected where='end' or 'forward'; got {where!r}")
        self.where = where
        self.factor = 2.0 if where == "forward" else 1.0  # of units that are kept
        self.weights = [w.numpy().copy() for w in network.weights]
        pairs = zip(self.weights, network.biases)
        self.biases = [np.zeros(len(w)) if b is None else b.numpy().copy() for w, b in pairs]
        self.widths = [len(w) for w in self.weights[:-1]]
        self.cuts = np.cumsum(self.widths)[:-1]

    def learn(self, x: Array, label: float, masks: Sequence[Array], rate: float) -> _Step:
        active, inputs, z = _pass(self.weights, self.biases, x, masks, self.where)
        error = _sigmoid(z) - label
        back = np.ones(1)  # ∂z by what the layer gives
        gradients = []
        for j in range(len(self.weights) - 1, -1, -1):
            gradients.append((np.outer(back, inputs[j]), back))
            if j:
                back = self.factor * active[j - 1] * (self.weights[j].T @ back)
        for weight, bias, (slope, shift) in zip(self.weights, self.biases, reversed(gradients)):
            weight -= rate * error * slope
            bias -= rate * error * shift
        return _Step(np.concatenate(active), z, float(np.linalg.norm(back)) / self.factor ** len(self.widths))

    def pairs(self) -> tuple[tuple[Tensor, Tensor], ...]:
        return tuple((torch.from_numpy(w), torch.from_numpy(b)) for w, b in zip(self.weights, self.biases))


class _Tail:
    """Records of the last steps."""

    def __init__(self, count: int, widths: Sequence[int]):
        self.active = np.zeros((count, sum(widths)), bool)
        self.phi, self.plain, self.outputs = np.zeros(count), np.zeros(count), np.zeros(count)

    def put(self, row: int, step: _Step) -> None:
        self.active[row], self.plain[row], self.outputs[row] = step.active, step.plain, _sigmoid(step.z)
        self.phi[row] = step.plain * _sigmoid(step.z) * _sigmoid(-step.z)

    def tensors(self, cuts: Array) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]:
        """Active units of each layer, φ, φ before the sigmoid, outputs."""
        patterns = tuple(torch.from_numpy(columns.copy()) for columns in np.split(self.active, cuts, axis=1))
        return patterns, torch.from_numpy(self.phi), torch.from_numpy(self.plain), torch.from_numpy(self.outputs)


def _pass(
    weights: Sequence[Array], biases: Sequence[Array], x: Array, retained: Sequence[Array], where: Where
) -> tuple[list[Array], list[Array], float]:
    """Active units that were kept, the input of every layer, and the output before the sigmoid."""
    active, inputs, full = [], [x], x
    for weight, bias, mask in zip(weights[:-1], biases[:-1], retained):
        h = weight @ inputs[-1] + bias
        if where == "end":
            full = np.maximum(weight @ full + bias, 0)
            on = mask & (full > 0)
            inputs.append(h * on)
        else:
            on = mask & (h > 0)
            inputs.append(2 * h * on)
        active.append(on)
    return active, inputs, float((weights[-1] @ inputs[-1] + biases[-1])[0])


def _sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))


class _Measurements:
    """All training points without dropout, now and then."""

    def __init__(self) -> None:
        self.count = 0
        self.min_output, self.beta, self.p_min, self.p_sum = 1.0, 0.0, 1.0, 0.0

    def measure(self, weights: Sequence[Array], biases: Sequence[Array], x: Array) -> None:
        h, masks = x, []
        for weight, bias in zip(weights[:-1], biases[:-1]):
            h = np.maximum(h @ weight.T + bias, 0)
            masks.append(h > 0)
        z = (h @ weights[-1].T + biases[-1])[:, 0]
        certain = 1 / (1 + np.exp(np.minimum(np.abs(z), 700)))  # the smaller of f and 1 − f
        slope = np.broadcast_to(weights[-1], (len(x), weights[-1].shape[1]))
        for weight, mask in zip(reversed(weights[:-1]), reversed(masks)):
            slope = (slope * mask) @ weight
        gradient_norm = np.linalg.norm(slope, axis=1) * certain * (1 - certain)
        pattern, fractions = np.concatenate(masks, 1), np.concatenate([mask.mean(0) for mask in masks])
        if not self.count:
            self.first, self.moved, self.low, self.high = pattern, np.zeros(len(x), bool), gradient_norm, gradient_norm
        self.moved = self.moved | (pattern != self.first).any(1)
        self.low, self.high = np.minimum(self.low, gradient_norm), np.maximum(self.high, gradient_norm)
        self.min_output = min(self.min_output, float(certain.min()))
        self.beta = max(self.beta, float(np.linalg.norm(weights[0], 2)))
        self.p_min = min(self.p_min, float(fractions.min()))
        self.p_sum += float(fractions.mean())
        self.count += 1

    def result(self) -> dict[str, Any]:
        moved = self.high > 0
        with np.errstate(divide="ignore"):
            ratios = self.high[moved] / self.low[moved]
        return {
            "measurements": self.count,
            "min_output": self.min_output,
            "beta": self.beta,
            "p_min": self.p_min,
            "p_avg": self.p_sum / self.count,
            "changed": int(self.moved.sum()),
            "gamma": float(ratios.max() - 1) if len(ratios) else 0.0,
        }
