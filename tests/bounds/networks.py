"""Networks at rest: the targets are what the network gives, so gradient descent stays there for every step up to 2/λ_max.

Everything here is written out slowly in numpy or with the full Hessian, apart from the code under test.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

Pairs = list[tuple[Tensor, Tensor | None]]


def random_network(widths: tuple[int, ...], bias: bool, seed: int) -> Pairs:
    generator = torch.Generator().manual_seed(seed)
    shapes = zip(widths[1:], widths[:-1])
    return [
        (
            torch.randn(o, i, generator=generator, dtype=torch.float64),
            torch.randn(o, generator=generator, dtype=torch.float64) / 2 if bias else None,
        )
        for o, i in shapes
    ]


def random_points(count: int, n: int, seed: int) -> Tensor:
    return torch.randn(count, n, generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64)


def evaluate(pairs: Pairs, x: Tensor) -> Tensor:
    for j, (weight, bias) in enumerate(pairs):
        x = x @ weight.T + (0 if bias is None else bias)
        if j + 1 < len(pairs):
            x = x.clamp(min=0)
    return x


def full_hessian(pairs: Pairs, x: Tensor, y: Tensor) -> Tensor:
    """Of ½ Σ ‖f − y‖² in all weights and biases, by torch.autograd.functional.hessian."""
    flat = torch.cat([p.reshape(-1) for pair in pairs for p in pair if p is not None])

    def loss(vector: Tensor) -> Tensor:
        built, at = [], 0
        for pair in pairs:
            parts: list[Tensor | None] = []
            for p in pair:
                if p is None:
                    parts.append(None)
                    continue
                parts.append(vector[at : at + p.numel()].reshape(p.shape))
                at += p.numel()
            built.append((parts[0], parts[1]))
        return (evaluate(built, x) - y).square().sum() / 2  # type: ignore[arg-type]

    return torch.autograd.functional.hessian(loss, flat)


def largest_step(pairs: Pairs, x: Tensor) -> float:
    """The largest step size at which gradient descent stays at a network that fits its points."""
    return 2 / float(torch.linalg.eigvalsh(full_hessian(pairs, x, evaluate(pairs, x)))[-1]) * (1 - 1e-9)


def regions(V: np.ndarray, b: np.ndarray) -> set[tuple[bool, ...]]:
    """All activation patterns in the plane, slowly: points on a fine circle around every corner of the arrangement and
    around every line's foot, and on a huge circle around everything."""
    r = len(V)
    centers = [np.zeros(2)]
    for i, j in itertools.combinations(range(r), 2):
        if abs(np.linalg.det(V[[i, j]])) > 1e-9:
            centers.append(np.linalg.solve(V[[i, j]], -b[[i, j]]))
    centers += [-b[i] * V[i] / (V[i] @ V[i]) for i in range(r) if V[i].any()]
    far = 1e3 * (1 + max(np.abs(c).max() for c in centers))
    found = set()
    for center in centers:
        for radius in (1e-7, 1e-4, far):
            # directions between any two neighbouring lines, so that no wedge is missed
            angles = np.sort(
                np.concatenate([np.arctan2(V[:, 1], V[:, 0]) + s * np.pi / 2 for s in (1, -1)]) % (2 * np.pi)
            )
            middle = (angles + np.append(angles[1:], angles[0] + 2 * np.pi)) / 2
            for t in np.concatenate([middle, angles + 1e-3, angles - 1e-3]):
                found.add(tuple((V @ (center + radius * np.array([np.cos(t), np.sin(t)])) + b > 0).tolist()))
    return found
