"""Many small trainings at once with cross-entropy, in float64, run until the direction of the weights hardly moves.

Every step is gradient descent on the logarithm of the loss (the same direction as the loss, without underflow), divided by
the squared size of the weights for networks: it follows gradient flow in direction, at a speed that does not die out.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


def pulls(margins: Tensor) -> Tensor:
    """−d log L / d margin for L = Σ log(1 + exp(−margin)) over the last axis, finite for margins of any size."""
    logs = torch.where(margins > 30, -margins, torch.log(torch.nn.functional.softplus(-margins.clamp(max=30))))
    return torch.exp(-torch.nn.functional.softplus(margins) - torch.logsumexp(logs, -1, keepdim=True))


def separable_points(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Points (N, n) in general position or in a subspace, off the origin, and labels that a hyperplane separates."""
    n, count = int(rng.integers(1, 7)), int(rng.integers(2, 20))
    x = rng.normal(size=(count, n))
    if rng.random() < 0.4 and n > 1:  # a proper affine subspace
        x[:, int(rng.integers(1, n)) :] = 0.0
        x = x @ np.linalg.qr(rng.normal(size=(n, n)))[0]
    x = x + rng.normal(size=n) * 10 ** rng.uniform(-1, 0.7)
    w = rng.normal(size=n)
    while True:
        along = np.sort(x @ w)
        cut = int(rng.integers(1, count))
        if along[cut] - along[cut - 1] > 1e-3:
            return x, (x @ w > (along[cut] + along[cut - 1]) / 2).astype(int)
        w = rng.normal(size=n)


def train_linear(
    problems: list[tuple[np.ndarray, np.ndarray]], steps: int, rate: Tensor, momentum: float = 0.0
) -> list[tuple[np.ndarray, float]]:
    """Weight and bias of a linear classifier for each set of points, from zero; `rate` (T,) is relative to 1/max‖(x, 1)‖²."""
    rows = _padded([np.column_stack([x, np.ones(len(x))]) * (2 * y[:, None] - 1) for x, y in problems])  # (T, N, n + 1)
    rows, there = rows
    z = torch.zeros(rows.shape[0], rows.shape[2], dtype=torch.float64)
    step = (rate / rows.square().sum(-1).amax(-1))[:, None]
    speed = torch.zeros_like(z)
    for _ in range(steps):
        margins = torch.where(there, torch.einsum("tnd,td->tn", rows, z), torch.inf)
        speed = momentum * speed + torch.einsum("tn,tnd->td", pulls(margins), rows)
        z = z + step * speed
    # The bias is the last column of each set's own dimension.
    sizes = [x.shape[1] for x, _ in problems]
    return [(v[:n].numpy(), float(v[n])) for v, n in zip(z, sizes)]


def train_two_layer(
    x: Tensor, y: Tensor, units: int, steps: int, rate: float, seed: int, scale: float = 0.1
) -> tuple[Tensor, Tensor, Tensor]:
    """V (T, r, n), b (T, r), w (T, r) for points x (T, N, n) and labels y (T, N)."""
    draw = torch.Generator().manual_seed(seed)
    count, _, n = x.shape
    s = 2.0 * y - 1
    a = torch.cat([x, torch.ones_like(x[..., :1])], -1)  # (x, 1)
    v = scale * torch.randn(count, units, n + 1, generator=draw, dtype=torch.float64)
    w = scale * torch.randn(count, units, generator=draw, dtype=torch.float64)
    reach = a.square().sum(-1).amax(-1)
    for _ in range(steps):
        before = a @ v.transpose(1, 2)  # (T, N, r)
        on = before.clamp(min=0)
        pull = s * pulls(s * (on @ w[..., None])[..., 0])
        step = (rate / (reach * (1 + v.square().sum((1, 2)) + w.square().sum(1))))[:, None]
        gradient_w = torch.einsum("tn,tnr->tr", pull, on)
        gradient_v = torch.einsum("tn,tnr,tnd->trd", pull, (before > 0).double(), a) * w[..., None]
        w, v = w + step * gradient_w, v + step[..., None] * gradient_v
    return v[..., :n], v[..., n], w


def train_deep_linear(
    x: Tensor, y: Tensor, widths: list[int], steps: int, rate: float, seed: int, decay: float = 0.0, scale: float = 1.0
) -> tuple[list[Tensor], list[Tensor]]:
    """Initial and final W_k (T, n_k, n_{k−1}) for x (T, N, n), y (T, N): on the log of the loss, or, with decay μ > 0, on
    L + μ Σ‖W‖² itself with a fixed step."""
    draw = torch.Generator().manual_seed(seed)
    s, sizes = 2.0 * y - 1, [x.shape[2], *widths, 1]
    weights = [
        scale * torch.randn(len(x), b, a, generator=draw, dtype=torch.float64) / a**0.5 for a, b in pairwise(sizes)
    ]
    first = [w.clone() for w in weights]
    reach = x.square().sum(-1).amax(-1)
    for _ in range(steps):
        hidden = [x]
        for w in weights:
            hidden.append(hidden[-1] @ w.transpose(1, 2))
        margins = s * hidden[-1][..., 0]
        back = (s * (torch.sigmoid(-margins) if decay else pulls(margins)))[..., None]  # (T, N, 1)
        gradients: list[Tensor] = []
        for w, h in zip(reversed(weights), reversed(hidden[:-1])):
            gradients.insert(0, back.transpose(1, 2) @ h)
            back = back @ w
        if decay:
            weights = [w + rate * (g - 2 * decay * w) for w, g in zip(weights, gradients)]
        else:
            # The curvature of the log of the loss in one layer is the squared norm of the product of the others.
            norms = torch.stack([w.square().sum((1, 2)) for w in weights])
            step = (rate / (reach * (norms.prod(0) / norms.amin(0)).clamp(min=1)))[:, None, None]
            weights = [w + step * g for w, g in zip(weights, gradients)]
    return first, weights


def _padded(rows: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    tall, wide = max(len(r) for r in rows), max(r.shape[1] for r in rows)
    out = torch.zeros(len(rows), tall, wide, dtype=torch.float64)
    there = torch.zeros(len(rows), tall, dtype=torch.bool)
    for k, r in enumerate(rows):
        out[k, : len(r), : r.shape[1]] = torch.from_numpy(r)
        there[k, : len(r)] = True
    return out, there
