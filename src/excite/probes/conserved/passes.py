"""In which precision the user's forward passes compute: under `torch.autocast` in less than that of the weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from excite._core.preserve import probes_ignored


class _Inert:
    """A hook that does nothing, for copies of the model."""

    def __call__(self, *args: Any) -> None:
        return None


class _Hook:
    """A forward pre-hook that copies and saved files of the model do not take along."""

    def __init__(self, passes: PassPrecision):
        self._passes = passes

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._passes.record()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inert:
        return _Inert()

    def __reduce__(self) -> tuple[type[_Inert], tuple[()]]:
        return _Inert, ()


class PassPrecision:
    """`eps` is the machine epsilon of autocast in the forward passes with gradients since the last step; 0 without autocast."""

    def __init__(self, modules: Iterable[nn.Module], device: torch.device):
        self._device = device.type
        self.eps = 0.0
        hook = _Hook(self)
        self._handles = [module.register_forward_pre_hook(hook) for module in modules]

    def record(self) -> None:
        """Records the precision of a forward pass under autocast."""
        if torch.compiler.is_compiling() or not torch.is_autocast_enabled(self._device):
            return
        if torch.is_grad_enabled() and not probes_ignored():
            self.eps = max(self.eps, torch.finfo(torch.get_autocast_dtype(self._device)).eps)

    def drain(self) -> float:
        """`eps`, and starts over; called once per step."""
        eps, self.eps = self.eps, 0.0
        return eps

    def close(self) -> None:
        """Removes all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
