"""Plain losses: the squared error on the scale of persistent excitation at radius 0, and cross-entropy."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from excite.errors import ModelError
from excite.wiring.calling import Pick, pick_output


def squared_error(model: nn.Module, output: Pick = None) -> Callable[[Tensor, Tensor], Tensor]:
    """loss(x, y): the batch **mean** of (f(x) − y)², for one output per sample and y of shape (B,) or (B, 1)."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        f = pick_output(model(x), output)
        if f.shape not in ((len(x),), (len(x), 1)):
            raise ModelError(f"expected one output per sample, ({len(x)},) or ({len(x)}, 1); got {tuple(f.shape)}")
        return (f.reshape(-1) - y.reshape(-1).to(f.dtype)).square().mean()

    return loss


def cross_entropy(model: nn.Module, output: Pick = None) -> Callable[[Tensor, Tensor], Tensor]:
    """loss(x, y): the batch **mean** of the cross-entropy of m ≥ 2 outputs per sample, for integer y of shape (B,)."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        f = pick_output(model(x), output)
        if f.dim() != 2 or f.shape[1] < 2:
            raise ModelError(
                f"cross-entropy: expected one output per class, ({len(x)}, 2) or more; got {tuple(f.shape)}"
            )
        return functional.cross_entropy(f, y.reshape(-1))

    return loss
