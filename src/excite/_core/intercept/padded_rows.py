"""Products with a weight whose number of rows is slow on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class PaddedRows(TorchFunctionMode):
    """While active, products with a weight of many rows, not a multiple of eight, are computed with rows of zeros added.

    An output layer for the 50,257 tokens of GPT-2 takes ten times as long on a GPU as one for 50,264: fast kernels need aligned rows.

    Args:
        rows: Number of rows from which it pays.
        device: Type of the device on which it pays.
    """

    def __init__(self, rows: int = 4096, device: str = "cuda"):
        super().__init__()
        self._rows, self._device = rows, device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and len(args) > 1 and isinstance(args[1], Tensor):
            weight, bias = args[1], (kwargs or {}).get("bias", args[2] if len(args) > 2 else None)
            count = weight.shape[0] if weight.dim() == 2 and weight.device.type == self._device else 0
            if count >= self._rows and count % 8 and not torch.is_grad_enabled() and not hasattr(weight, "to_local"):
                more = -count % 8
                weight, bias = F.pad(weight, (0, 0, 0, more)), None if bias is None else F.pad(bias, (0, more))
                return F.linear(args[0], weight, bias)[..., :count].contiguous()
        return func(*args, **(kwargs or {}))
