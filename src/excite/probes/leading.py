"""Leading singular values and vectors of matrices: all of them, or a few by subspace iteration from a warm start.

Many small matrices are done together, those of one size in one stack: on a GPU what counts is the number of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    residual: Tensor
    basis: Tensor | None  # where the next call can start
    side: Tensor  # W or W', (small, large)
    flipped: bool
    vector: Tensor  # (small,)

    @property
    def complete(self) -> bool:
        return self.basis is None

    @property
    def small(self) -> int:
        return len(self.side)

    @property
    def left(self) -> Tensor:
        return self._other() if self.flipped else self.vector

    @property
    def right(self) -> Tensor:
        return self.vector if self.flipped else self._other()

    def _other(self) -> Tensor:
        other = self.side.to(self.vector.dtype).T @ self.vector
        length: Tensor = torch.linalg.vector_norm(other)
        return other / length.clamp_min(torch.finfo(other.dtype).tiny)


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
    """Of one matrix; see `leading_of`."""
    return leading_of([matrix], [basis], exact=exact, block=block, warm=warm, cold=cold, seed=seed)[0]


def leading_of(
    matrices: Sequence[Tensor],
    bases: Sequence[Tensor | None],
    *,
    exact: int,
    block: int = 8,
    warm: int = 4,
    cold: int = 40,
    seed: int = 0,
) -> list[Leading]:
    """Up to the smaller dimension `exact` an eigendecomposition of G in float64. Beyond, subspace iteration with `block`
    vectors: `warm` iterations from a basis if it fits, else `cold` ones from random vectors; no value is waited for."""
    sides: list[Tensor] = []
    flips: list[bool] = []
    groups: dict[tuple[int, bool, torch.dtype, torch.device], list[int]] = {}
    for number, (matrix, basis) in enumerate(zip(matrices, bases)):
        wide = matrix.detach().flatten(1)
        small = min(wide.shape)
        flips.append(wide.shape[0] > wide.shape[1])
        side = wide.T if flips[-1] else wide  # (small, large)
        dtype = torch.float64 if small <= exact else torch.promote_types(side.dtype, torch.float32)
        sides.append(side.to(dtype))
        fits = small > exact and basis is not None and basis.shape == (small, block)
        groups.setdefault((small, fits, dtype, side.device), []).append(number)
    found: dict[int, Leading] = {}
    for (small, fits, *_), members in groups.items():
        mine = [sides[i] for i in members]
        fourth: Tensor | None
        ends: Tensor | None = None
        if small <= exact:
            squares, totals, fourth, residual, vectors = _whole(mine)
        else:
            known = [basis for i in members if fits and (basis := bases[i]) is not None]
            if known:
                start = torch.stack([basis.to(side) for basis, side in zip(known, mine)])
            else:
                generator = torch.Generator().manual_seed(seed)
                start = torch.linalg.qr(torch.randn(small, block, generator=generator).to(mine[0]))[0]
                start = start.expand(len(members), -1, -1)
            squares, totals, fourth, residual, ends = _iterated(mine, start, (warm if fits else cold) // 2)
            vectors = ends[:, :, 0]
        for k, number in enumerate(members):
            found[number] = Leading(
                squares=squares[k],
                total=totals[k],
                fourth=None if fourth is None else fourth[k],
                residual=residual[k],
                basis=None if ends is None else ends[k],
                side=mine[k],
                flipped=flips[number],
                vector=vectors[k],
            )
    return [found[number] for number in range(len(sides))]


def _whole(sides: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """σ², Σσ², Σσ⁴, residuals and first vectors from all eigenvalues."""
    grams = torch.stack([side @ side.T for side in sides])
    values, vectors = torch.linalg.eigh(grams)
    squares = values.flip(1).clamp_min(0)
    return squares, _trace(grams), squares.square().sum(1), squares.new_zeros(len(sides)), vectors[:, :, -1]


def _iterated(
    sides: Sequence[Tensor], basis: Tensor, rounds: int
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """First σ², Σσ², Σσ⁴, residuals and bases (matrices, small, block) after 2 · `rounds` iterations."""
    grams = torch.stack([side @ side.T for side in sides]) if len(sides[0]) <= _GRAM else None

    def apply(v: Tensor) -> Tensor:
        if grams is not None:
            return grams @ v
        return torch.stack([side @ (side.T @ one) for side, one in zip(sides, v)])

    for _ in range(rounds):
        basis = torch.linalg.qr(apply(apply(basis)))[0]  # every second time: it takes longer than the products
    image = apply(basis)
    values, turn = torch.linalg.eigh(basis.mT @ image)
    turn = turn.flip(2)
    basis, image = basis @ turn, image @ turn
    squares = values.flip(1).clamp_min(0)
    off = image[:, :, 0] - squares[:, :1] * basis[:, :, 0]
    residual = off.norm(dim=1) / squares[:, 0].clamp_min(torch.finfo(basis.dtype).tiny)
    if grams is None:
        return squares, torch.stack([_squares(side) for side in sides]), None, residual, basis
    return squares, _trace(grams), _squares(grams), residual, basis


def _trace(grams: Tensor) -> Tensor:
    """In float64: the sums of squares of the matrices whose inner products these are."""
    return grams.diagonal(dim1=-2, dim2=-1).double().sum(-1)


def _squares(matrix: Tensor) -> Tensor:
    """The sum of all squares in float64, over the last two axes, without a copy of the matrix."""
    rows: Tensor = torch.linalg.vector_norm(matrix, dim=-1)
    return rows.double().square().sum(-1)
