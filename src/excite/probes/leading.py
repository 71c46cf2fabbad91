"""Leading singular values and vectors of a matrix: all of them, or a few by subspace iteration from a warm start."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_GRAM = 4096  # up to this size the matrix of inner products is formed once; beyond, each iteration multiplies twice


@dataclass(frozen=True)
class Leading:
    """Of a matrix (m, n), tensors on its device: `squares` σ², largest first, all or the first few; the sum of all of them,
    `total` = ‖W‖²_F, and of their squares, `fourth` (None where it was not formed); the first `left` (m,) and `right` (n,)
    singular vectors; `residual` ‖G v − σ₁² v‖ / σ₁² of the first, G = W W' or W' W, 0 where all were computed.

    A σ₁² from subspace iteration is never above the truth, and some eigenvalue of G lies within the residual of it.
    """

    squares: Tensor
    total: Tensor
    fourth: Tensor | None
    left: Tensor
    right: Tensor
    residual: Tensor
    basis: Tensor | None  # where the next call can start

    @property
    def complete(self) -> bool:
        return self.basis is None


def leading(
    matrix: Tensor,
    *,
    exact: int,
    basis: Tensor | None = None,
    block: int = 8,
    warm: int = 4,
    cold: int = 40,
    seed: int = 0,
) -> Leading:
    """Up to the smaller dimension `exact` an eigendecomposition of G in float64. Beyond, subspace iteration with `block`
    vectors: `warm` iterations from `basis` if it fits, else `cold` ones from random vectors; no value is waited for."""
    wide = matrix.detach().flatten(1)
    small = min(wide.shape)
    flipped = wide.shape[0] > wide.shape[1]
    side = wide.T if flipped else wide  # (small, large)
    if small <= exact:
        side = side.double()
        values, vectors = torch.linalg.eigh(side @ side.T)
        squares = values.flip(0).clamp_min(0)
        return _finish(side, flipped, squares, vectors[:, -1], squares.square().sum(), squares.new_zeros(()), None)
    side = side.to(torch.promote_types(side.dtype, torch.float32))
    gram = side @ side.T if small <= _GRAM else None

    def apply(v: Tensor) -> Tensor:
        return gram @ v if gram is not None else side @ (side.T @ v)

    fits = basis is not None and basis.shape == (small, block)
    if not fits:
        generator = torch.Generator().manual_seed(seed)
        basis = torch.linalg.qr(torch.randn(small, block, generator=generator).to(side))[0]
    basis = basis.to(side)  # type: ignore[union-attr]
    for _ in range(warm if fits else cold):
        basis = torch.linalg.qr(apply(basis))[0]
    image = apply(basis)
    values, turn = torch.linalg.eigh(basis.T @ image)
    basis, image = basis @ turn.flip(1), image @ turn.flip(1)
    squares = values.flip(0).clamp_min(0)
    residual = (image[:, 0] - squares[0] * basis[:, 0]).norm() / squares[0].clamp_min(torch.finfo(side.dtype).tiny)
    fourth = None if gram is None else gram.double().square().sum()
    return _finish(side, flipped, squares, basis[:, 0], fourth, residual, basis)


def _finish(
    side: Tensor,
    flipped: bool,
    squares: Tensor,
    vector: Tensor,
    fourth: Tensor | None,
    residual: Tensor,
    basis: Tensor | None,
) -> Leading:
    other = side.T @ vector
    other = other / other.norm().clamp_min(torch.finfo(other.dtype).tiny)
    left, right = (other, vector) if flipped else (vector, other)
    return Leading(squares, side.double().square().sum(), fourth, left, right, residual, basis)
