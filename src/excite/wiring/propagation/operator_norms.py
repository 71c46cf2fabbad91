"""2-norms of linear maps: exact, or bounds from above. Never estimates from below.

All maps go from flattened samples to flattened samples; everything is computed in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_LARGEST = 4_000_000  # entries of an operator that is written out as a matrix
_MAX_PRODUCTS = 2e10  # multiplications spent on the spectrum of a convolution


def matrix_norm(weight: Tensor) -> float:
    """The largest singular value of W, the largest one over leading axes."""
    weight = weight.detach().double()
    return float(torch.linalg.matrix_norm(weight, ord=2).max()) if weight.numel() else 0.0


def positive_norm(function: Callable[[Tensor], Tensor], shape: Sequence[int]) -> float:
    """sqrt(‖A‖₁ ‖A‖_∞) ≥ ‖A‖₂ for a linear map without negative entries: the largest entries of A'1 and of A1."""
    x = torch.ones(tuple(shape), dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        y = function(x)
        (back,) = torch.autograd.grad(y.sum(), x)
    return math.sqrt(float(back.max()) * float(y.detach().max()))


def convolution_norm(
    function: Callable[[Tensor, Tensor], Tensor],
    weight: Tensor,
    shape: Sequence[int],
    spectrum: Callable[[], float | None] = lambda: None,
) -> tuple[float, bool]:
    """The norm of x ↦ function(x, weight), linear in both, for inputs (1, C, ...); and whether it is exact.

    From the matrix itself if it is small enough, else the smaller of sqrt(‖A‖₁ ‖A‖_∞), which is what |W| makes of ones,
    and of the bound from the spectrum.
    """
    weight = weight.detach().double()
    count = math.prod(shape)
    with torch.no_grad():
        out = function(torch.zeros(tuple(shape), dtype=torch.float64), weight).numel()
        if count * out <= _LARGEST:
            basis = torch.eye(count, dtype=torch.float64).view(count, *shape[1:])
            return matrix_norm(function(basis, weight).reshape(count, -1)), True
    rough = positive_norm(lambda x: function(x, weight.abs()), shape)
    finer = spectrum()
    return (rough if finer is None else min(rough, finer)), False


def spectral_bound(weight: Tensor, size: Sequence[int], dilation: Sequence[int], groups: int) -> float | None:
    """An upper bound on the 2-norm of a convolution with zero padding, any stride, on inputs of this spatial size.

    On a torus of size + reach (reach = dilation · (kernel − 1)) nothing wraps around, so the convolution is a part of the
    circular one: some of its inputs, some of its outputs. The norm of the circular one is the largest singular value
    over its frequencies. None if that is too much work.
    """
    weight = weight.detach().double()
    torus = [n + d * (k - 1) for n, k, d in zip(size, weight.shape[2:], dilation)]
    outputs, inputs = weight.shape[0] // groups, weight.shape[1]
    operations = math.prod(torus) / 2 * groups * min(outputs, inputs) ** 2 * max(outputs, inputs)
    if operations > _MAX_PRODUCTS:
        return None
    padded = weight.new_zeros(*weight.shape[:2], *torus)
    corner = padded
    for axis, (kernel, step) in enumerate(zip(weight.shape[2:], dilation), start=2):
        corner = corner.narrow(axis, 0, step * (kernel - 1) + 1)
        corner = corner.unfold(axis, 1, step).squeeze(-1)
    corner.copy_(weight)
    spectrum = torch.fft.rfftn(padded, dim=tuple(range(2, padded.dim()))).flatten(2)  # (O, I, frequencies)
    blocks = spectrum.reshape(groups, outputs, inputs, -1).movedim(-1, 0)
    return float(torch.linalg.matrix_norm(blocks, ord=2).max())


def windows_per_element(size: int, out: int, window: Callable[[int], Sequence[int]]) -> int:
    """In how many windows an element stands at most, along one axis; `window(i)` lists the elements of window i."""
    count = [0] * size
    for i in range(out):
        for j in window(i):
            if 0 <= j < size:
                count[j] += 1
    return max(count, default=0)


def copies(function: Callable[[Tensor], Tensor], shape: Sequence[int]) -> int:
    """How often an operation that only moves numbers about repeats one of them (padding with zeros does not count)."""
    numbers = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).view(tuple(shape))
    moved = function(numbers).reshape(-1).round().long()
    return int(torch.bincount(moved[moved > 0]).max()) if moved.numel() else 0
