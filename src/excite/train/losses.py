"""The plain loss, on the scale of persistent excitation at radius 0."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from excite._core.calls import Pick, pick_output
from excite.errors import ModelError


def squared_error(model: nn.Module, output: Pick = None) -> Callable[[Tensor, Tensor], Tensor]:
    """loss(x, y): the batch **mean** of (f(x) − y)², for one output per sample and y of shape (B,) or (B, 1)."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        f = pick_output(model(x), output)
        if f.shape not in ((len(x),), (len(x), 1)):
            raise ModelError(f"expected one output per sample, ({len(x)},) or ({len(x)}, 1); got {tuple(f.shape)}")
        return (f.reshape(-1) - y.reshape(-1).to(f.dtype)).square().mean()

    return loss
