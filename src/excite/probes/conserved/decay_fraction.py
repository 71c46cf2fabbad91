"""The part of an optimizer's momentum that comes from weight decay.

Coupled decay adds λ w to the gradient, so it enters the buffer v and acts again at later steps. The buffer is linear in what
enters it: v = v_g + v_d, where v_d follows the optimizer's recursion with λ w alone. Then −η v_d, past decay included, is what
decay does, and −η v_g what momentum makes of the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Maps = Sequence[Mapping[str, Any]]


class DecayShare:
    """v_d of every parameter; nothing is kept before an optimizer has momentum and coupled decay together.

    What decay left in a buffer before the first recorded step stays unknown and counts as momentum.
    """

    def __init__(self) -> None:
        self.buffers: list[Tensor] | None = None
        self._fresh: list[bool] = []

    def before(self, states: Maps, settings: Maps, weights: Sequence[Tensor]) -> bool:
        """Whether decay acts through a buffer in the step to come. `states` are those of the optimizer before it."""
        if self.buffers is None:
            if not any(_coupled(s) and (s.get("momentum") or "betas" in s) for s in settings):
                return False
            self.buffers = [torch.zeros_like(w) for w in weights]
        self._fresh = [state.get("momentum_buffer") is None for state in states]
        return True

    def directions(
        self, before: Sequence[Tensor], settings: Maps, trained: Sequence[bool], correction: Sequence[float]
    ) -> list[Tensor]:
        """Moves the buffers on by the step just made, and returns d: decay moved the weights by −η d / correction."""
        assert self.buffers is not None
        alike: dict[tuple[float, float], list[int]] = {}
        for i, setting in enumerate(settings):
            if trained[i]:
                alike.setdefault(_recursion(setting, self._fresh[i]), []).append(i)
        for (factor, gain), indices in alike.items():
            buffers = [self.buffers[i] for i in indices]
            torch._foreach_mul_(buffers, factor)
            if gain:
                torch._foreach_add_(buffers, [before[i] for i in indices], alpha=gain)
        result = []
        for i, (setting, w, buffer) in enumerate(zip(settings, before, self.buffers)):
            decay = float(setting["weight_decay"])
            if setting.get("decoupled_weight_decay"):
                result.append(w * (decay * correction[i]))
            elif "momentum" in setting and not setting["momentum"]:
                result.append(w * decay)
            elif setting.get("nesterov"):
                result.append(torch.add(w * decay, buffer, alpha=setting["momentum"]))
            else:
                result.append(buffer)
        return result


def _coupled(setting: Mapping[str, Any]) -> float:
    return 0.0 if setting.get("decoupled_weight_decay") else float(setting["weight_decay"])


def _recursion(setting: Mapping[str, Any], fresh: bool) -> tuple[float, float]:
    """(a, b) of v_d ← a v_d + b w. The first buffer of SGD is the gradient itself, without dampening."""
    decay = _coupled(setting)
    if "betas" in setting:
        first = float(setting["betas"][0])
        return first, (1 - first) * decay
    if fresh:
        return 0.0, decay
    return float(setting["momentum"]), (1 - float(setting["dampening"])) * decay
