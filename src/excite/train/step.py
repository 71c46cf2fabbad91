"""One training step: gradients of the loss, then the optimizer's update."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from excite._core.checks import shown
from excite.errors import InputError

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(eq=False)
class Step:
    """step(x, y): the loss before the update, detached: one number, or one for each of `networks` trained together.

    `setting()` says what a step depends on besides its tensors, such as the radius. `check(loss)` is called before the
    gradients: what it refuses does not reach the weights. `adapt(x, y)` is called before a replayed step, where the loss is
    not. `why_not` says why the step is not captured in a CUDA graph.
    """

    loss: Loss
    optimizer: torch.optim.Optimizer
    setting: Callable[[], Hashable] = lambda: None
    networks: int = 1
    adapt: Callable[[Tensor, Tensor], None] = lambda x, y: None

    def __post_init__(self) -> None:
        self.check: Callable[[Tensor], None] = lambda loss: None
        self.why_not: str | None = None

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Does one training step (zero_grad, loss, backward, optimizer step) and returns the loss."""
        self.optimizer.zero_grad()
        loss = self.loss(x, y)
        if not isinstance(loss, Tensor):
            raise InputError(f"expected a loss that is a tensor with a gradient; got {shown(loss)}")
        if loss.numel() != self.networks or not loss.requires_grad:
            expected = "one number" if self.networks == 1 else f"{self.networks} numbers"
            raise InputError(f"expected a loss of {expected} with a gradient; got shape {tuple(loss.shape)}")
        self.check(loss.detach())
        loss.sum().backward()  # networks trained together share no weights: each has the gradient of its own loss
        self.optimizer.step()
        return loss.detach()
