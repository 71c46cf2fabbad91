"""The linear part A of an affine call as an operator on one flattened sample.

Its largest singular value, and the smallest one of the rows that are active.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from threading import Lock
from typing import TypeAlias

import torch
from torch import Tensor

from excite._core.background import record_stream
from excite._core.lanczos import krylov_space
from excite.probes.bias_trajectory.sites import TracedLayer

_LARGEST = 4_000_000  # entries of an operator that is written out as a matrix
_MAX_PRODUCTS = 5e8  # multiplications spent on the singular values of active rows
_SPACE = 20  # dimension of a search for the largest singular value, before it restarts from its result
_NOISE = 0.3  # relative to the vector from which a search continues


Gram: TypeAlias = tuple[Callable[[Tensor], Tensor], Tensor]  # x ↦ A'A x, and a sample of zeros


class Estimate:
    """σ₁, not computed yet.

    `inner` (k, k) is V A'A V' of orthonormal rows V (k, inputs) and `images` is V A'A; or, alone, A'A or A A' itself.
    """

    def __init__(self, inner: Tensor, space: Tensor | None = None, images: Tensor | None = None):
        self._inner, self._space, self._images = inner, space, images
        self._solved: tuple[float, float] | None = None
        self._lock = Lock()

    @staticmethod
    def known(vector: Tensor) -> Estimate:
        """Only where a search ended."""
        estimate = Estimate(vector[:0], vector[None])
        estimate._solved = (math.inf, math.inf)
        return estimate

    def result(self) -> tuple[float, float]:
        """σ₁ and its error relative to it, by Rayleigh and Ritz; the first time it waits for the device."""
        with self._lock:
            if self._solved is None:
                self._solved = self._solve()
                self._inner, self._images = self._inner[:0], None
            return self._solved

    def vector(self) -> Tensor:
        """The Ritz vector (inputs,)."""
        self.result()
        assert self._space is not None
        return record_stream(self._space)[0]

    def _solve(self) -> tuple[float, float]:
        if not bool(self._inner.isfinite().all()):
            return math.nan, 0.0
        squares, turn = torch.linalg.eigh(self._inner)
        square, top = float(squares[-1]), turn[:, -1]
        if self._space is None or self._images is None:
            return math.sqrt(max(0.0, square)), 0.0
        vector = top @ self._space
        error = float((top @ self._images - squares[-1] * vector).norm()) / square / 2 if square > 0 else 0.0
        self._space = vector[None]
        return math.sqrt(max(0.0, square)), error


class LayerOperator:
    """A of z = A x + b for one site, with the weight as it is now. Vectors of samples have the batch axis in front."""

    def __init__(self, site: TracedLayer):
        self.site = site
        self.last: Estimate | None = None  # where the last search for the largest singular value ended
        self._noise: Tensor | None = None

    def _bound(self, count: int = 1) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """x ↦ A x (plus what comes of zero) for samples on the first axis, with the weight as it is now; and `count` zeros."""
        call, in_axis, axis, merged = self.site.call, self.site.in_axis, self.site.axis, self.site.merged
        weight = call.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        call = call.linear_part(wide)
        args, (argument, *inner) = list(call.args), call.input_at
        device = weight.device.type

        def run(x: Tensor) -> Tensor:
            with torch.autocast(device, enabled=False):
                value = x.flatten(0, 1) if merged else x.movedim(0, in_axis)
                output: Tensor
                if call.before or inner or not isinstance(argument, int):
                    output = call.run(value)
                else:
                    args[argument] = value
                    output = call.function(*args, **call.kwargs)
                    args[argument] = None
                return output.unflatten(0, (len(x), -1)) if merged else output.movedim(axis, 0)

        shape = [n for i, n in enumerate(self.site.shape) if i != in_axis]
        return run, weight.new_zeros(count, *shape, dtype=wide)

    def _zeros(self, weight: Tensor) -> Tensor:
        shape = [n for i, n in enumerate(self.site.shape) if i != self.site.in_axis]
        return weight.new_zeros(1, *shape, dtype=torch.promote_types(weight.dtype, torch.float32))

    def apply(self, x: Tensor) -> Tensor:
        """A x, (k, inputs...) -> (k, outputs...)."""
        with torch.no_grad():
            run, _ = self._bound()
            return run(x) - run(torch.zeros_like(x[:1]))

    def transpose(self, y: Tensor) -> Tensor:
        """A'y, (k, outputs...) -> (k, inputs...)."""
        with torch.enable_grad():
            run, zeros = self._bound(len(y))
            x = zeros.requires_grad_()
            (result,) = torch.autograd.grad(run(x), x, y.to(x.dtype))
        return result

    def gram(self) -> Gram:
        """x ↦ A'A x with the weight as it is now, by one forward and one backward pass each; and a sample of zeros.

        What comes of zero (padding with other numbers) is subtracted. The bias is left out before: beside a large one A x
        would be lost to rounding.
        """
        run, zeros = self._bound()
        with torch.no_grad():
            offset = run(zeros)

        def product(x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = run(x)
                (gradient,) = torch.autograd.grad(y, x, y.detach() - offset)
            return gradient

        return product, zeros

    @property
    def matrix(self) -> Tensor | None:
        """The weight (outputs, inputs) if A applies it to the last axis; None for convolutions and other products."""
        weight = self.site.call.matrix(len(self.site.shape) - self.site.merged)
        return None if weight is None else weight.detach().to(torch.promote_types(weight.dtype, torch.float32))

    @property
    def finite(self) -> bool:
        """Whether the weight still is; a training may have diverged."""
        return bool(self.site.call.weight.detach().isfinite().all())

    def largest(self, tolerance: float = 1e-4, max_products: int = 300) -> tuple[float, float]:
        """σ₁ and how well it is known, relative to it: 0 from the singular values of a matrix.

        Otherwise by Lanczos on A'A, the real convolution with its stride and padding, that starts where the last one ended:
        σ is then never more than the truth, and a singular value lies within `tolerance` · σ of it unless `max_products` products
        were not enough. NaN for weights that are not finite.
        """
        if not self.finite:
            return math.nan, 0.0
        matrix = self.matrix
        if matrix is not None:
            return float(torch.linalg.matrix_norm(matrix, ord=2)), 0.0
        return self._converged(tolerance, max_products)

    def _converged(self, tolerance: float, max_steps: int = 300, gram: Gram | None = None) -> tuple[float, float]:
        value, error = 0.0, math.inf
        gram = gram or self.gram()
        for turn in range(math.ceil(max_steps / _SPACE)):
            # The weights may have changed since the last call, and with them which direction leads.
            value, error = self._search(gram, _SPACE, 0.0 if turn else _NOISE).result()
            if error <= tolerance:
                break
        return value, error

    def follow(self, products: int = 8) -> Estimate:
        """The same from where the last search ended, by a given number of products and without waiting for the device.

        Some noise is mixed in: the direction that becomes the leading one may be orthogonal to the one that was.
        """
        matrix = self.matrix
        if matrix is not None:
            return Estimate(matrix @ matrix.T if len(matrix) < matrix.shape[1] else matrix.T @ matrix)
        gram = self.gram()
        if not self.started and self.finite:
            self._converged(1e-3, gram=gram)
        return self._search(gram, products, _NOISE)

    @property
    def started(self) -> bool:
        """Whether there is an estimate to start from."""
        return self.last is not None

    def state_dict(self) -> dict[str, Tensor]:
        """Where the next search starts."""
        if self.last is None or math.isnan(self.last.result()[0]):
            return {}
        return {"vector": self.last.vector().clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores the state from a checkpoint."""
        self.last = None
        if state:
            vector = state["vector"].to(self.site.call.weight.device)
            self.last = Estimate.known(vector)

    def _search(self, gram: Gram, products: int, noise: float = 0.0) -> Estimate:
        """Lanczos from where the last search ended, with `noise` of a random vector added."""
        product, zeros = gram
        last = None if self.last is None or math.isnan(self.last.result()[0]) else self.last
        if self._noise is None or self._noise.shape != zeros.shape or self._noise.device != zeros.device:
            random = torch.randn(zeros.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            self._noise = (random / random.norm()).to(zeros)
            if last is not None and (len(last.vector()) != zeros.numel() or last.vector().device != zeros.device):
                last = None
        start = self._noise if last is None else last.vector().reshape(zeros.shape) + noise * self._noise
        v = start.to(zeros.dtype).flatten()
        space, images = krylov_space(lambda row: product(row.reshape(zeros.shape)).flatten(), v, min(products, len(v)))
        self.last = Estimate(space @ images.T, space, images)
        return self.last

    def smallest_active(self, active: Tensor) -> Callable[[], Tensor | None]:
        """σ_min of the active rows of A for every sample: active (B, outputs...) -> (B,), when it is called.

        The smallest ‖A'y‖ over unit vectors y that live on the active rows: 0 if these are more than the inputs, or none.
        None where it would take too much work, NaN for weights that are not finite. The weight is read here, the device
        waited for there.
        """
        matrix, count = self.matrix, len(active)
        if matrix is not None and active.shape[-1] == len(matrix):
            return partial(_by_pattern, matrix.clone(), active)
        weight = self.site.call.weight.detach()
        flat, zeros = active.reshape(count, -1), self._zeros(weight)
        inputs = zeros.numel()
        more = flat.sum(1) > inputs
        written = None
        if inputs * flat.shape[1] <= _LARGEST and (more.is_cuda or not bool(more.all())):
            basis = torch.eye(inputs, dtype=zeros.dtype, device=active.device)
            written = self.apply(basis.reshape(inputs, *zeros.shape[1:])).reshape(inputs, -1).T
        size = weight.abs().amax()

        def minimum() -> Tensor | None:
            if not math.isfinite(float(size)):
                return torch.full((count,), math.nan, dtype=zeros.dtype, device=active.device)
            if bool(more.all()):
                return torch.zeros(count, dtype=zeros.dtype, device=active.device)
            return None if written is None else _smallest(written, flat)

        return minimum


def _by_pattern(matrix: Tensor, active: Tensor) -> Tensor | None:
    """The same for a matrix on the last axis, pattern by pattern."""
    if not bool(matrix.isfinite().all()):
        return matrix.new_full((len(active),), math.nan)
    patterns, pattern_of = torch.unique(active.reshape(-1, len(matrix)), dim=0, return_inverse=True)
    result = _smallest(matrix, patterns)
    if result is None:
        return None
    result = torch.where(patterns.any(1), result, math.inf)  # a position without active rows does not count
    minimum = result[pattern_of].reshape(len(active), -1).amin(1)
    return torch.where(torch.isinf(minimum), 0.0, minimum)


def _smallest(matrix: Tensor, patterns: Tensor) -> Tensor | None:
    """σ_|A|(W_A) for every row A of patterns (P, outputs); 0 where |A| is 0 or more than the inputs."""
    outputs, inputs = matrix.shape
    sizes = patterns.sum(1)
    result = matrix.new_zeros(len(patterns))
    possible = (sizes > 0) & (sizes <= inputs)
    rows = int(possible.sum())
    if rows * outputs * inputs * min(outputs, inputs) > _MAX_PRODUCTS:
        if outputs > inputs:
            return None
        # Rows taken out of a wide matrix can only raise its smallest singular value.
        return torch.where(possible, torch.linalg.svdvals(matrix)[-1], result)
    if rows:
        masked = patterns[possible].to(matrix.dtype)[:, :, None] * matrix
        values = torch.linalg.svdvals(masked)  # (rows, min(outputs, inputs)), largest first
        result[possible] = values.gather(1, (sizes[possible] - 1)[:, None]).squeeze(1)
    return result
