"""The learning rate over a training, from its share that is done: nothing to keep in a checkpoint.

constant    the optimizer's own
one-cycle   linearly up to the optimizer's own in the first fifth, then linearly down to nothing
step        the optimizer's own, a tenth of it from half of training on, a hundredth from three quarters on
"""

from __future__ import annotations

import torch
from torch import Tensor

RISE = 0.2


def one_cycle(progress: float) -> float:
    """The factor on the learning rate when `progress` of training is done, 0 to 1."""
    return min(progress / RISE, (1 - progress) / (1 - RISE))


def step_decay(progress: float) -> float:
    """The factor on the learning rate when `progress` of training is done, 0 to 1."""
    return 1.0 if progress < 0.5 else 0.1 if progress < 0.75 else 0.01


SCHEDULES = {"one-cycle": one_cycle, "step": step_decay}


class RateSchedule:
    """Sets the learning rates of an optimizer before each step; `name` is one of `SCHEDULES`.

    Where steps are `captured` on a GPU they become tensors, so that a captured step reads their present values.
    """

    def __init__(self, name: str, optimizer: torch.optim.Optimizer, captured: bool = True):
        self.factor, self.optimizer, self.captured = SCHEDULES[name], optimizer, captured
        self.peaks = [float(group["lr"]) for group in optimizer.param_groups]

    def __call__(self, step: int, steps: int) -> None:
        """Before step number `step` of `steps`, counted from 0; no step has rate zero."""
        factor = self.factor((step + 1) / (steps + 1))
        for group, peak in zip(self.optimizer.param_groups, self.peaks):
            device = group["params"][0].device
            if device.type != "cuda" or not self.captured:
                group["lr"] = peak * factor
            elif isinstance(group["lr"], Tensor) and group["lr"].device == device:
                group["lr"].fill_(peak * factor)
            else:
                group["lr"] = torch.tensor(peak * factor, device=device)
