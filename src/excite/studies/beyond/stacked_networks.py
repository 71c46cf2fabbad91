"""Networks of one form trained at once by any optimizer of torch, with normalizations, by plain autograd.

Weights are stacked (S, out, in). The sum of the networks' losses has in each network's weights the gradient of its own loss,
and optimizers that work entry by entry treat each network as if it were alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Normalization = Literal["none", "layer", "batch"]
_MOMENTUM, _EPS = 0.1, 1e-5  # of the running statistics, as in nn.BatchNorm1d


class Stacked(nn.Module):
    """S networks: a fixed identity with a trained bias, ReLU, hidden layers with a normalization before each ReLU, one output.

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
        self.first = nn.Parameter(torch.stack([one[0] for one in drawn]))
        self.weights = nn.ParameterList(torch.stack([one[1][k] for one in drawn]) for k in range(len(sizes)))
        self.biases = nn.ParameterList(torch.stack([one[2][k] for one in drawn]) for k in range(len(sizes)))
        scaled = sizes[:-1] if normalization != "none" else []
        self.scales = nn.ParameterList(torch.ones(count, o) for o, _ in scaled)
        self.shifts = nn.ParameterList(torch.zeros(count, o) for o, _ in scaled)
        self.means = [torch.zeros(count, 1, o) for o, _ in scaled]
        self.variances = [torch.ones(count, 1, o) for o, _ in scaled]

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        z = [x + self.first[:, None]]
        given = [x]
        for k, (weight, bias) in enumerate(zip(self.weights, self.biases)):
            inner = z[-1] if k == 0 else self._normalized(z[-1], k - 1)
            given.append(inner.relu())
            z.append(torch.baddbmm(bias[:, None], given[-1], weight.mT))
        return z[-1][:, :, 0], z, given

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
    """Curves (S, T) over windows of steps: means over samples of the normalized update of the first bias, of all weights
    (√Σ‖dL/dW_l‖² / |dL/df|, each sample's own), the training loss, and at each window's end the exact mean slope at the
    training points in evaluation mode and the test loss."""

    bias: Tensor
    weights: Tensor
    loss: Tensor
    slope: Tensor
    test: Tensor


def train(
    networks: Stacked,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    test: tuple[Tensor, Tensor],
    *,
    steps: int,
    batch: int,
    windows: int,
    progress: Callable[[float], None] = lambda share: None,
) -> Trajectories:
    """x (S, N, n), y (S, N). One order of points for all; half squared error, mean over the batch."""
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
        f, z, given = networks(x[:, at])
        loss = (f - y[:, at]).square().mean(1) / 2
        found = torch.autograd.grad(loss.sum(), [f, *z, *parameters])
        for p, g in zip(parameters, found[1 + len(z) :]):
            p.grad = g
        optimizer.step()
        error = found[0].abs()
        norms = [g.norm(dim=2) for g in found[1 : 1 + len(z)]]
        squares = sum((n * h.detach().norm(dim=2)).square() for n, h in zip(norms[1:], given[1:]))
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


def evaluate(networks: Stacked, x: Tensor, test: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The mean of the exact slopes at x, and the test loss, in evaluation mode (S,) each."""
    networks.eval()
    f, z, _ = networks(x)
    (gradient,) = torch.autograd.grad(f.sum(), z[0])  # the first weight is the identity
    with torch.no_grad():
        far = (networks(test[0])[0] - test[1]).square().mean(1) / 2
    networks.train()
    return gradient.norm(dim=2).mean(1), far


def optimizer_of(name: str, networks: nn.Module, lr: float) -> torch.optim.Optimizer:
    ways: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(networks.parameters(), lr),
        "momentum": lambda: torch.optim.SGD(networks.parameters(), lr, momentum=0.9),
        "adam": lambda: torch.optim.Adam(networks.parameters(), lr),
        "adamw": lambda: torch.optim.AdamW(networks.parameters(), lr, weight_decay=0.01),
    }
    return ways[name]()


def log_ratio(over: float, under: float) -> float:
    return math.log10(over / under) if over > 0 and under > 0 else math.nan
