"""How tensors were made of signals and weights: what `affine` remembers of a pass to recognize affine calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from excite._core.intercept.affine_call import At, InputStep, replaced
from excite._core.intercept.functions import CASTS, SHAPED
from excite._core.intercept.names import Sources


class WeightedSum:
    """(x · w).sum(…) as one function of x and w."""

    __name__ = "weighted_sum"

    def __init__(self, multiply: Callable[..., Any], total: Callable[..., Any], args: Any, kwargs: dict[str, Any]):
        self._multiply, self._total, self._args, self._kwargs = multiply, total, args, kwargs

    def __call__(self, input: Tensor, weight: Tensor) -> Any:
        return self._total(self._multiply(input, weight), *self._args, **self._kwargs)


class DivisionByWeight:
    """x / w as a product of x and 1 / w; with the rounding of the division for this very 1 / w."""

    __name__ = "division"

    def __init__(self, divisor: Tensor):
        self._divisor, self.reciprocal = divisor, divisor.reciprocal()

    def __call__(self, input: Tensor, weight: Tensor) -> Tensor:
        return input / self._divisor if weight is self.reciprocal else input * weight


def rounded(function: Callable[..., Tensor], dtype: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """The function with its result cast to `dtype`."""
    return lambda input, weight: function(input, weight).to(dtype)


@dataclass(frozen=True)
class SignalTrace:
    """How a tensor was made of a signal.

    By a step that belongs to the affine call that follows, or by a product with a weight (`weight_at`) of which a sum may follow.
    """

    result: weakref.ref[Tensor]
    signal: Tensor
    versions: tuple[int, int]
    step: InputStep
    weight_at: At | None = None

    def of(self, tensor: Tensor) -> bool:
        """Whether it is still about this tensor, and neither it nor the signal has been written to."""
        return self.result() is tensor and self.versions == (version(tensor), version(self.signal))


@dataclass(frozen=True)
class MixedSignal:
    """A sum or product of a signal and a matrix of parameters, and these.

    `full`: there is no more of it than of the matrix, so that it is a weight; a matrix that is added to each of many samples may be
    one, or a bias such as a table of positions. `varies`: along which axes the matrix does, as long as they have not been moved.
    """

    result: weakref.ref[Tensor]
    sources: Sources
    full: bool
    varies: tuple[bool, ...] | None = None

    def weighs(self, own: str, other: str, result: str) -> bool:
        """Whether it is a matrix for the other factor of a product, given in the letters of einsum.

        It varies along an axis that is summed, and along one that only it has. A bias for every head of attention does not.
        """
        along = {letter for letter, varies in zip(own, self.varies or (True,) * len(own)) if varies}
        return any(k in other and k not in result for k in along) and any(k not in other and k in result for k in along)


def version(tensor: Tensor) -> int:
    """How often a tensor was written to; 0 for inference tensors, which do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def input_step(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], at: At, result: Tensor
) -> InputStep:
    """The function without its signal, and without the number of samples."""
    if func in SHAPED:
        return InputStep(Tensor.reshape, (None, (-1, *result.shape[1:])), {}, (0,))
    if func in CASTS:
        return InputStep(Tensor.to, (None,), {"dtype": result.dtype, "device": result.device}, (0,))
    return InputStep(func, *replaced(args, kwargs, {at: None}), at)
