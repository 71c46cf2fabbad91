"""Objectives of the search of adversarial training besides the error of the target: the divergence of TRADES, the margin."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from excite.errors import InputError
from excite.excitation.targets.binary import Binary
from excite.excitation.targets.codes import Codes
from excite.excitation.targets.tokens import Tokens


def divergence(clean: Tensor, moved: Tensor) -> Tensor:
    """KL(p(x) ‖ p(x + d)) of each sample, (B,).

    Args:
        clean: Logits at x: (B, m), or (B,) for two classes, where one logit f stands for the logits 0 and f.
        moved: Logits at x + d, of the same shape.
    """
    if clean.dim() == 1:
        clean, moved = (torch.stack([torch.zeros_like(f), f], 1) for f in (clean, moved))
    p, q = clean.log_softmax(1), moved.log_softmax(1)
    return F.kl_div(q, p, reduction="none", log_target=True).sum(1)


def confusion(target: Binary | Codes | Tokens) -> Callable[[Tensor, Tensor], Tensor]:
    """The errors of loss="margin": how far the largest other output is above that of the label.

    Raises:
        InputError: For token targets.
    """
    if isinstance(target, Tokens):
        raise InputError("loss: token targets have the cross-entropy only; got 'margin'")
    return target.confusion
