"""The ball of each norm, for methods that start inside it at random and step past its edge."""

from __future__ import annotations

import torch
from torch import Tensor

from excite._core.checks import Norm


def project(rows: Tensor, norm: Norm, radius: float) -> Tensor:
    """The nearest point of the ball in the 2-norm, for each row of (B, n)."""
    if norm == "inf":
        return rows.clamp(-radius, radius)
    length: Tensor = rows.norm(p=float(norm), dim=1, keepdim=True)
    if norm == "2":
        return rows * (radius / length.clamp(min=torch.finfo(rows.dtype).tiny)).clamp(max=1)
    # Soft thresholding at the one level where the sum of what remains is the radius.
    sorted_, _ = rows.abs().sort(1, descending=True)
    above = (sorted_.cumsum(1) - radius) / torch.arange(1, rows.shape[1] + 1, device=rows.device, dtype=rows.dtype)
    count = (sorted_ > above).sum(1, keepdim=True).clamp(min=1)
    level = above.gather(1, count - 1)
    return torch.where(length <= radius, rows, rows.sign() * (rows.abs() - level).clamp(min=0))


def random_point(like: Tensor, norm: Norm, radius: float, generator: torch.Generator | None = None) -> Tensor:
    """A point drawn uniformly from the ball, for each row of (B, n); from the global random state without a generator."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=like.device, dtype=like.dtype)

    batch, n = like.shape
    if norm == "inf":
        cube: Tensor = radius * (2 * uniform(batch, n) - 1)
        return cube
    if norm == "2":
        rows = torch.randn((batch, n), generator=generator, device=like.device, dtype=like.dtype)
    else:  # exponential sizes, normalized, are uniform on the simplex; then random signs
        rows = (1 - uniform(batch, n)).log() * (2 * (uniform(batch, n) < 0.5) - 1)
    length = rows.norm(p=float(norm), dim=1, keepdim=True).clamp(min=torch.finfo(like.dtype).tiny)
    ball: Tensor = rows * (radius * uniform(batch, 1).pow(1 / n) / length)
    return ball
