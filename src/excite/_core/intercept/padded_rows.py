"""Products with a weight whose number of rows is slow on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excite._core.intercept.other_weights import OtherWeights

ROWS = 4096  # from which it pays


class PaddedWeight(Tensor):
    """A weight (rows, width) that `F.linear` multiplies with rows of zeros added; every other function gets the plain tensor.

    An output layer for the 50,257 tokens of GPT-2 takes ten times as long on a GPU as one for 50,264: fast kernels need aligned rows.
    Not a mode, which would see every function that the model calls.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear and not torch.is_grad_enabled():
                return _padded_linear(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))


def _padded_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` for a weight whose number of rows is no multiple of eight."""
    count, more = weight.shape[0], -weight.shape[0] % 8
    weight, bias = F.pad(weight, (0, 0, 0, more)), None if bias is None else F.pad(bias, (0, more))
    return F.linear(input, weight, bias)[..., :count].contiguous()


def padded(weight: Tensor, rows: int = ROWS, device: str = "cuda") -> Tensor:
    """The weight as a `PaddedWeight` where that pays: many rows, not a multiple of eight, on a GPU, and not sharded.

    Args:
        weight: A weight.
        rows: Number of rows from which it pays.
        device: Type of the device on which it pays.
    """
    slow = weight.dim() == 2 and weight.shape[0] >= rows and weight.shape[0] % 8 and weight.device.type == device
    if not slow or hasattr(weight, "to_local"):
        return weight
    return weight.detach().as_subclass(PaddedWeight)


@contextmanager
def padded_weights(model: nn.Module, rows: int = ROWS, device: str = "cuda") -> Iterator[None]:
    """The model has the padded form of its weights where that pays, for passes without gradients."""
    replacements = {path: padded(p, rows, device) for path, p in model.named_parameters()}
    replacements = {path: p for path, p in replacements.items() if isinstance(p, PaddedWeight)}
    if not replacements:
        yield
        return
    own = {path: p for path, p in model.named_parameters() if path in replacements}
    with OtherWeights(model, own).swapped_in(replacements):
        yield
