"""The linear part A of an affine call as an operator on one flattened sample: its largest singular value, and the smallest
one of the rows that are active."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from excite.probes.sites import Site

_LARGEST = 4_000_000  # entries of an operator that is written out as a matrix
_WORK = 5e8  # multiplications spent on the singular values of active rows


class Operator:
    """A of z = A x + b for one site, with the weight as it is now. Vectors of samples have the batch axis in front."""

    def __init__(self, site: Site):
        self.site = site
        self._vectors: Tensor | None = None  # where the last search for the largest singular value ended

    @property
    def started(self) -> bool:
        return self._vectors is not None

    def _call(self, x: Tensor) -> Tensor:
        call = self.site.call
        wide = torch.promote_types(call.weight.dtype, torch.float32)
        args = tuple(
            a.detach().to(wide) if isinstance(a, Tensor) and i != call.input_at else a for i, a in enumerate(call.args)
        )
        kwargs = {
            k: a.detach().to(wide) if isinstance(a, Tensor) and k != call.input_at else a
            for k, a in call.kwargs.items()
        }
        if isinstance(call.input_at, int):
            args = tuple(x if i == call.input_at else a for i, a in enumerate(args))
        else:
            kwargs[call.input_at] = x
        with torch.autocast(x.device.type, enabled=False):
            return call.function(*args, **kwargs)  # type: ignore[no-any-return]

    def _zeros(self, count: int) -> Tensor:
        shape = [n for i, n in enumerate(self.site.shape) if i != self.site.in_axis]
        weight = self.site.call.weight
        return weight.new_zeros(count, *shape, dtype=torch.promote_types(weight.dtype, torch.float32))

    def _run(self, x: Tensor) -> Tensor:
        return self._call(x.movedim(0, self.site.in_axis)).movedim(self.site.axis, 0)

    def apply(self, x: Tensor) -> Tensor:
        """A x, (k, inputs...) -> (k, outputs...)."""
        with torch.no_grad():
            return self._run(x) - self._run(torch.zeros_like(x[:1]))

    def transpose(self, y: Tensor) -> Tensor:
        """A'y, (k, outputs...) -> (k, inputs...)."""
        with torch.enable_grad():
            x = self._zeros(len(y)).requires_grad_()
            (found,) = torch.autograd.grad(self._run(x), x, y.to(x.dtype))
        return found

    def gram(self, x: Tensor) -> Tensor:
        """A'A x, in one forward and one backward pass."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = self._run(x)
            with torch.no_grad():
                image = y - self._run(torch.zeros_like(x[:1]))
            (found,) = torch.autograd.grad(y, x, image)
        return found

    @property
    def matrix(self) -> Tensor | None:
        """The weight (outputs, inputs) if A applies it to the last axis; None for convolutions and other products."""
        call, name = self.site.call, getattr(self.site.call.function, "__name__", "")
        if call.kind != "linear" or call.weight.dim() != 2 or name == "einsum":
            return None
        weight = call.weight.detach()
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        if name == "linear":
            return weight
        return weight.T if str(call.input_at) < str(call.weight_at) else None  # x @ W; in W @ x columns are samples

    @property
    def finite(self) -> bool:
        """Whether the weight still is; a training may have diverged."""
        return bool(self.site.call.weight.detach().isfinite().all())

    def largest(self, tolerance: float = 1e-4, most: int = 300, block: int = 4) -> tuple[float, float]:
        """σ₁ and how well it is known, relative to it: 0 from the singular values of a matrix.

        Otherwise by power iteration of `block` vectors on A'A, the real convolution with its stride and padding, that
        starts where the last one ended: σ is then never more than the truth, and a singular value lies within
        `tolerance` · σ of it unless `most` steps were not enough. NaN for weights that are not finite.
        """
        if not self.finite:
            return math.nan, 0.0
        matrix = self.matrix
        if matrix is not None:
            return float(torch.linalg.matrix_norm(matrix, ord=2)), 0.0
        zeros = self._zeros(block)
        if self._vectors is None or self._vectors.shape != zeros.shape or self._vectors.device != zeros.device:
            start = torch.randn(zeros.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            self._vectors = start.to(zeros)
        v = self._vectors.to(zeros.dtype)
        value, error = 0.0, math.inf
        for _ in range(most):
            q = torch.linalg.qr(v.flatten(1).T).Q  # (inputs, block), orthonormal columns
            v = q.T.reshape(-1, *zeros.shape[1:])
            back = self.gram(v)
            squares, turn = torch.linalg.eigh(v.flatten(1) @ back.flatten(1).T)  # Rayleigh and Ritz
            top = turn[:, -1]
            square = float(squares[-1])
            if square <= 0:
                value, error = 0.0, 0.0
                break
            rest = torch.tensordot(top, back, 1) - squares[-1] * torch.tensordot(top, v, 1)
            value, error = math.sqrt(square), float(rest.norm()) / square / 2
            v = back
            if error <= tolerance:
                break
        self._vectors = v.detach()
        return value, error

    def smallest_active(self, active: Tensor) -> Tensor | None:
        """σ_min of the active rows of A for every sample: active (B, outputs...) -> (B,).

        The smallest ‖A'y‖ over unit vectors y that live on the active rows: 0 if these are more than the inputs, or none.
        None where it would take too much work, NaN for weights that are not finite.
        """
        matrix = self.matrix
        count = len(active)
        if not self.finite:
            return torch.full((count,), math.nan, dtype=self._zeros(1).dtype, device=active.device)
        if matrix is not None and active.shape[-1] == len(matrix):
            patterns, owner = torch.unique(active.reshape(-1, len(matrix)), dim=0, return_inverse=True)
            found = _smallest(matrix, patterns)
            if found is None:
                return None
            found = torch.where(patterns.any(1), found, math.inf)  # a position without active rows does not count
            least = found[owner].reshape(count, -1).amin(1)
            return torch.where(torch.isinf(least), 0.0, least)
        flat = active.reshape(count, -1)
        inputs = self._zeros(1).numel()
        if bool((flat.sum(1) > inputs).all()):
            return torch.zeros(count, dtype=self._zeros(1).dtype, device=active.device)
        if inputs * flat.shape[1] > _LARGEST:
            return None
        basis = torch.eye(inputs, dtype=self._zeros(1).dtype, device=active.device)
        written = self.apply(basis.reshape(inputs, *self._zeros(1).shape[1:])).reshape(inputs, -1).T
        return _smallest(written, flat)


def _smallest(matrix: Tensor, patterns: Tensor) -> Tensor | None:
    """σ_|A|(W_A) for every row A of patterns (P, outputs); 0 where |A| is 0 or more than the inputs."""
    outputs, inputs = matrix.shape
    sizes = patterns.sum(1)
    result = matrix.new_zeros(len(patterns))
    possible = (sizes > 0) & (sizes <= inputs)
    rows = int(possible.sum())
    if rows * outputs * inputs * min(outputs, inputs) > _WORK:
        if outputs > inputs:
            return None
        # Rows taken out of a wide matrix can only raise its smallest singular value.
        return torch.where(possible, torch.linalg.svdvals(matrix)[-1], result)
    if rows:
        kept = patterns[possible].to(matrix.dtype)[:, :, None] * matrix
        values = torch.linalg.svdvals(kept)  # (rows, min(outputs, inputs)), largest first
        result[possible] = values.gather(1, (sizes[possible] - 1)[:, None]).squeeze(1)
    return result
