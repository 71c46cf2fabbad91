"""The settings of an optimizer as plain numbers: PyTorch also takes tensors for them, on any device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Settings = Mapping[str, Any]
_NUMBERS = ("lr", "weight_decay", "momentum", "dampening", "betas", "eps", "alpha", "lr_decay")


class Hyperparameters:
    """Param groups with numbers for tensors.

    A tensor on another device is copied to the host only when it was changed, so that reading the settings at every step does not wait
    for the device.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int, float]] = {}
        self._steps: dict[int, tuple[Tensor, float]] = {}

    def plain(self, group: Settings) -> dict[str, Any]:
        """The settings of a param group as numbers.

        `coarse` is the largest rounding error, relative, with which the optimizer computes its coefficients: 0 in Python's floats, that of
        the dtype where a setting is a tensor.
        """
        result = {key: value for key, value in group.items() if key != "params"}
        coarse = 0.0
        for key in _NUMBERS:
            value = result.get(key)
            for member in value if isinstance(value, tuple | list) else (value,):
                if isinstance(member, Tensor) and member.is_floating_point():
                    coarse = max(coarse, torch.finfo(member.dtype).eps)
            if isinstance(value, tuple | list):
                result[key] = tuple([self._number(item) for item in value])
            elif value is not None:
                result[key] = self._number(value)
        result["coarse"] = coarse
        # Adam then counts its steps in float32 and computes 1 − βᵗ from them.
        counted = bool(result.get("capturable") or result.get("differentiable")) and not result.get("fused")
        result["counted"] = torch.finfo(torch.float32).eps if counted else 0.0
        return result

    def _number(self, value: Any) -> float:
        if not isinstance(value, Tensor):
            return float(value)
        if value.device.type == "cpu":
            return float(value)
        known = self._known.get(id(value))
        if known is None or known[0] is not value or known[1] != value._version:
            known = self._known[id(value)] = value, value._version, float(value)
        return known[2]

    def steps(self, number: int, state: Mapping[str, Any]) -> float:
        """How many steps the optimizer has made with parameter `number`, read once after each of them."""
        steps = state["step"]
        if not isinstance(steps, Tensor) or steps.device.type == "cpu":
            return float(steps)
        known = self._steps.get(number)
        count = float(steps) if known is None or known[0] is not steps else known[1] + 1
        self._steps[number] = steps, count
        return count

    def forget_steps(self) -> None:
        """After a step that may not have been counted: the counts are read from the optimizer once more."""
        self._steps.clear()
