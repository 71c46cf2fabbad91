"""Derivatives of models with functions of which PyTorch has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from excite.errors import ExciteError, ModelError

_FLOOR_DIVISIONS = {torch.floor_divide, Tensor.floor_divide, Tensor.__floordiv__}


class _FloorDivision(TorchFunctionMode):
    """Computes `x // c` as `torch.div(x, c, rounding_mode="floor")`: the same numbers, with the derivative zero."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FLOOR_DIVISIONS:
            return torch.div(*args, **(kwargs or {}), rounding_mode="floor")
        return func(*args, **(kwargs or {}))


@contextmanager
def differentiable() -> Iterator[None]:
    """A context for a forward and backward pass. Raises ModelError where PyTorch has no derivative."""
    try:
        with _FloorDivision():
            yield
    except ExciteError:
        raise
    except RuntimeError as error:
        line = (str(error).splitlines() or [""])[0]
        if "out=..." not in line and not ("derivative for" in line and "not implemented" in line):
            raise
        raise ModelError(f"expected a model that PyTorch can differentiate by its input; {line}") from error
