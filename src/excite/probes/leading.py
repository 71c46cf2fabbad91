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
    """Of a matrix (m, n), tensors on its device: `squares` σ², largest first, all or the first few of the `small` = min(m, n);
    the sum of all of them, `total` = ‖W‖²_F, and of their squares, `fourth` (None where it was not formed); the first `left`
    singular vector (m,); `residual` ‖G v − σ₁² v‖ / σ₁² of the first, G = W W' or W' W, 0 where all were computed; the `basis`
    from which the next call can start, None where all were computed.

    A σ₁² from subspace iteration is never above the truth, and some eigenvalue of G lies within the residual of it.
    """

    squares: Tensor
    total: Tensor
    fourth: Tensor | None
    residual: Tensor
    left: Tensor
    small: int
    basis: Tensor | None

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
    """Of one matrix; see `Search`."""
    return Search([matrix], [basis], exact=exact, block=block, warm=warm, cold=cold, seed=seed).found()[0]


class Search:
    """Up to the smaller dimension `exact` an eigendecomposition of G in float64. Beyond, subspace iteration with `block`
    vectors: `warm` iterations from a basis if it fits, else `cold` ones from random vectors.

    The matrices are read when the search is made, and no value is waited for. `found` finishes it: torch waits for the
    device in every eigendecomposition, so it may be called from another thread.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        bases: Sequence[Tensor | None],
        *,
        exact: int,
        block: int = 8,
        warm: int = 4,
        cold: int = 40,
        seed: int = 0,
    ):
        sides: list[tuple[Tensor, bool]] = []
        groups: dict[tuple[int, bool, torch.dtype, torch.device], list[int]] = {}
        for number, (matrix, basis) in enumerate(zip(matrices, bases)):
            wide = matrix.detach().flatten(1)
            small, flipped = min(wide.shape), wide.shape[0] > wide.shape[1]
            dtype = torch.float64 if small <= exact else torch.promote_types(wide.dtype, torch.float32)
            sides.append(((wide.T if flipped else wide).to(dtype), flipped))  # (small, large)
            fits = small > exact and basis is not None and basis.shape == (small, block)
            groups.setdefault((small, fits, dtype, wide.device), []).append(number)
        self._stacks = []
        self.bases: list[Tensor | None] = [None] * len(sides)
        for (small, fits, *_), members in groups.items():
            mine = [sides[i] for i in members]
            start = None
            if fits:
                start = torch.stack([basis.to(mine[0][0]) for i in members if (basis := bases[i]) is not None])
            elif small > exact:
                generator = torch.Generator().manual_seed(seed)
                start = torch.linalg.qr(torch.randn(small, block, generator=generator).to(mine[0][0]))[0]
                start = start.expand(len(members), -1, -1)
            stack = _Stack(members, mine, start, (warm if fits else cold) // 2)
            self._stacks.append(stack)
            if stack.basis is not None:
                for number, basis in zip(members, stack.basis):
                    self.bases[number] = basis

    def found(self) -> list[Leading]:
        by_number = {number: one for stack in self._stacks for number, one in zip(stack.members, stack.found())}
        return [by_number[number] for number in range(len(self.bases))]


class _Stack:
    """Matrices (small, large) of one smaller dimension, some of them `flipped`, and the subspaces (matrices, small, block)
    after 2 · `rounds` iterations; without a basis the whole space."""

    def __init__(self, members: Sequence[int], sides: Sequence[tuple[Tensor, bool]], basis: Tensor | None, rounds: int):
        self.members, self.basis, self._small = members, basis, len(sides[0][0])
        matrices = [side for side, _ in sides]
        grams = torch.stack([side @ side.T for side in matrices]) if basis is None or self._small <= _GRAM else None

        def apply(v: Tensor) -> Tensor:
            if grams is not None:
                return grams @ v
            return torch.stack([side @ (side.T @ one) for side, one in zip(matrices, v)])

        self._image = self._fourth = None
        if basis is not None:
            for _ in range(rounds):
                basis = torch.linalg.qr(apply(apply(basis)))[0]  # every second time: it takes longer than the products
            self.basis, self._image = basis, apply(basis)
        if grams is None:
            self._total = torch.stack([_squares(side) for side in matrices])
        else:
            self._total = grams.diagonal(dim1=-2, dim2=-1).double().sum(-1)
            self._fourth = _squares(grams)
        self._inner = grams if basis is None or self._image is None else basis.mT @ self._image
        # W v for what may become of v. In memory of its own: the weights go on.
        spaces = [None] * len(sides) if basis is None else basis.unbind()
        self._across = [
            None if not flipped else side.T.clone() if space is None else side.T @ space
            for (side, flipped), space in zip(sides, spaces)
        ]

    def found(self) -> list[Leading]:
        assert self._inner is not None
        values, turns = torch.linalg.eigh(self._inner)
        squares = values.flip(1).clamp_min(0)
        first = turns[:, :, -1:]
        tiny = torch.finfo(squares.dtype).tiny
        if self.basis is None or self._image is None:
            vectors, residual = first[:, :, 0], squares.new_zeros(len(squares))
        else:
            vectors = (self.basis @ first)[:, :, 0]
            off = (self._image @ first)[:, :, 0] - squares[:, :1] * vectors
            residual = off.norm(dim=1) / squares[:, 0].clamp_min(tiny)
        lefts = list(vectors)
        for k, across in enumerate(self._across):
            if across is not None:
                other = across @ first[k, :, 0]
                lefts[k] = other / other.norm().clamp_min(tiny)
        fourth = [None] * len(lefts) if self._fourth is None else self._fourth.unbind()
        bases = [None] * len(lefts) if self.basis is None else self.basis.unbind()
        columns = zip(squares, self._total, fourth, residual, lefts, bases)
        return [Leading(s, total, f, r, left, self._small, basis) for s, total, f, r, left, basis in columns]


def _squares(matrix: Tensor) -> Tensor:
    """The sum of all squares in float64, over the last two axes, without a copy of the matrix."""
    rows: Tensor = torch.linalg.vector_norm(matrix, dim=-1)
    return rows.double().square().sum(-1)
