"""Leading singular values and vectors of matrices: all of them, or a few by a block Krylov method from a warm start.

Many small matrices are done together, those of one size in one stack: on a GPU what counts is the number of calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from excite.errors import ModelError

_GRAM = 4096  # up to this size the matrix of inner products is formed once; beyond, each product multiplies twice
_POWERS = 2  # of G, on the vectors that led before
_DEGREE = 7  # on a random one: with the others up to 32 vectors, the most that a GPU solves in one batch


@dataclass(frozen=True)
class Leading:
    """Leading singular values and vectors of a matrix (m, n), tensors on its device.

    `squares` σ², largest first, all or the first few of the `small` = min(m, n); the sum of all of them, `total` = ‖W‖²_F, and of their
    squares, `fourth` (None where it was not formed); the first `left` singular vector (m,); `residual` ‖G v − σ₁² v‖ / σ₁² of the first,
    G = W W' or W' W, 0 where all were computed; the `basis` from which the next call can start, None where all were computed.

    A σ₁² from a Krylov space is never above the truth, and some eigenvalue of G lies within the residual of it.
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
        """Whether all singular values were computed."""
        return self.basis is None


def leading(
    matrix: Tensor,
    *,
    exact: int,
    basis: Tensor | None = None,
    block: int = 8,
    cold: int = 12,
) -> Leading:
    """Of one matrix; see `Search`."""
    return Search([matrix], [basis], exact=exact, block=block, cold=cold).result()[0]


class Search:
    """Search for the leading singular vectors of several matrices.

    Up to the smaller dimension `exact` an eigendecomposition of G in float64. Beyond, the best in the span of V, G V, G² V and
    z, G z, …, G⁷ z. V is the basis of the last search, if it fits, else `block` random vectors, and then the search is
    repeated `cold` times; z is random, since a direction that comes to lead may be orthogonal to all that did before.

    The matrices are read when the search is made, and where it starts from a basis no value is waited for. `found` finishes
    it: torch waits for the device in every eigendecomposition, so it may be called from another thread.
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        bases: Sequence[Tensor | None],
        *,
        exact: int,
        block: int = 8,
        cold: int = 12,
    ):
        sides: list[tuple[Tensor, bool]] = []
        groups: dict[tuple[int, bool, torch.dtype, torch.device], list[int]] = {}
        for number, (matrix, basis) in enumerate(zip(matrices, bases)):
            wide = matrix.detach().flatten(1)
            small, flipped = min(wide.shape), wide.shape[0] > wide.shape[1]
            dtype = torch.float64 if small <= exact else torch.promote_types(wide.dtype, torch.float32)
            sides.append(((wide.T if flipped else wide).to(dtype), flipped))  # (small, large)
            fits = small > exact and basis is not None and basis.shape == (small, min(block, small))
            groups.setdefault((small, fits, dtype, wide.device), []).append(number)
        self._stacks = []
        for (small, fits, dtype, device), members in groups.items():
            start = None
            if small > exact:
                noise = _noise(small, 1 + min(block, small), dtype, device).expand(len(members), -1, -1)
                start = noise
                if fits:
                    known = torch.stack([basis.to(noise) for i in members if (basis := bases[i]) is not None])
                    start = torch.cat([noise[:, :, :1], known], 2)
            self._stacks.append(_Stack(members, [sides[i] for i in members], start, 1 if fits else cold))

    def result(self) -> list[Leading]:
        """Finishes the search and returns the result for each matrix; waits for the device."""
        by_number = {
            number: vectors for stack in self._stacks for number, vectors in zip(stack.members, stack.result())
        }
        return [by_number[number] for number in range(len(by_number))]


class _Stack:
    """Matrices (small, large) of one smaller dimension, some of them `flipped`.

    For each an orthonormal basis (small, k) of the space in which its leading vectors are sought; None for the whole space.
    """

    def __init__(self, members: Sequence[int], sides: Sequence[tuple[Tensor, bool]], start: Tensor | None, times: int):
        self.members, self._small = members, len(sides[0][0])
        matrices = [side for side, _ in sides]
        grams = torch.stack([side @ side.T for side in matrices]) if start is None or self._small <= _GRAM else None

        def apply(v: Tensor) -> Tensor:
            if grams is not None:
                return grams @ v
            return torch.stack([side @ (side.T @ vector) for side, vector in zip(matrices, v)])

        self._space = self._image = self._fourth = None
        self._inner = grams
        if grams is None:
            self._total = torch.stack([_squares(side) for side in matrices])
        else:
            self._total = grams.diagonal(dim1=-2, dim2=-1).double().sum(-1)
            self._fourth = _squares(grams)
        if start is not None:
            random, start = start[:, :, :1], start[:, :, 1:]
            self._block = start.shape[2]
            # Powers neither overflow nor vanish: σ₁² is between the mean of all and their sum.
            shrink = (self._small**0.5 / self._total.clamp_min(1e-30)).to(start.dtype)[:, None, None]
            for i in range(times):
                start = self._leading_vectors(_solved(self._inner)[1]) if i and self._inner is not None else start
                powers = [torch.cat([random, start], 2)]
                for k in range(_DEGREE):
                    last = powers[-1] if k < _POWERS else powers[-1][:, :, :1]
                    powers.append(apply(last) * shrink)
                self._space = _orthonormal(torch.cat(powers, 2))
                self._image = apply(self._space)
                self._inner = self._space.mT @ self._image
        # W v for what may become of v. In memory of its own: the weights continue to change.
        spaces = [None] * len(sides) if self._space is None else self._space.unbind()
        self._across = [
            None if not flipped else side.T.clone() if space is None else side.T @ space
            for (side, flipped), space in zip(sides, spaces)
        ]

    def _leading_vectors(self, rotations: Tensor) -> Tensor:
        """The leading vectors, from which the next search can start."""
        assert self._space is not None
        retained: Tensor = self._space @ rotations[:, :, -self._block :].flip(2)
        return retained

    def result(self) -> list[Leading]:
        assert self._inner is not None
        values, rotations = _solved(self._inner)
        squares = values.flip(1).clamp_min(0)
        first = rotations[:, :, -1:]
        tiny = torch.finfo(squares.dtype).tiny
        bases: Sequence[Tensor | None] = [None] * len(squares)
        if self._space is None or self._image is None:
            vectors, residual = first[:, :, 0], squares.new_zeros(len(squares))
        else:
            squares = squares[:, : self._block]
            bases = self._leading_vectors(rotations).unbind()
            vectors = (self._space @ first)[:, :, 0]
            off = (self._image @ first)[:, :, 0] - squares[:, :1] * vectors
            residual = off.norm(dim=1) / squares[:, 0].clamp_min(tiny)
        lefts = list(vectors)
        for k, across in enumerate(self._across):
            if across is not None:
                other = across @ first[k, :, 0]
                lefts[k] = other / other.norm().clamp_min(tiny)
        fourth = [None] * len(lefts) if self._fourth is None else self._fourth.unbind()
        columns = zip(squares, self._total, fourth, residual, lefts, bases)
        return [Leading(s, total, f, r, left, self._small, basis) for s, total, f, r, left, basis in columns]


@lru_cache(maxsize=64)  # made on the CPU, and the way to a device takes time
def _noise(small: int, block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random unit columns (small, block)."""
    random = torch.randn(small, block, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    columns: Tensor = random / random.norm(dim=0)
    return columns.to(device, dtype)


def _solved(inner: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors; waits for the device.

    With several threads MKL does not converge on some matrices in float32 whose entries reach far below rounding (of a basis of which
    some vectors lead nowhere). They are solved in float64 without these entries; all others as PyTorch does.
    """
    if not bool(inner.isfinite().all()):
        raise ModelError("the weights are not finite: they have no singular values")
    try:
        values, vectors = torch.linalg.eigh(inner)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        peak = inner.abs().amax((-2, -1), keepdim=True)
        above = inner.abs() > peak * (torch.finfo(inner.dtype).eps / inner.shape[-1])
        values, vectors = torch.linalg.eigh(torch.where(above, inner, 0).double())
    return values.to(inner.dtype), vectors.to(inner.dtype)


def _orthonormal(vectors: Tensor) -> Tensor:
    """A basis of what the columns (matrices, small, k) span.

    On a GPU, where QR goes matrix by matrix, by Cholesky factors in float64. What depends on other columns then comes out
    shorter than one instead of random, so that nothing sought in this space is found larger than it is.
    """
    if not vectors.is_cuda:
        basis: Tensor = torch.linalg.qr(vectors)[0]
        return basis
    return shifted_cholesky(vectors)


def shifted_cholesky(vectors: Tensor) -> Tensor:
    """Three times: each squares the distance from orthonormal columns, once the shift has made the first possible."""
    wide = vectors.double()
    wide = wide / wide.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    for _ in range(3):
        inner = wide.mT @ wide
        inner.diagonal(dim1=-2, dim2=-1).add_(1e-13 * inner.shape[-1])
        factor, _ = torch.linalg.cholesky_ex(inner)
        wide = torch.linalg.solve_triangular(factor, wide.mT, upper=False).mT
    basis: Tensor = wide.to(vectors.dtype)
    return basis


def _squares(matrix: Tensor) -> Tensor:
    """The sum of all squares in float64, over the last two axes, without a copy of the matrix."""
    rows: Tensor = torch.linalg.vector_norm(matrix, dim=-1)
    return rows.double().square().sum(-1)
