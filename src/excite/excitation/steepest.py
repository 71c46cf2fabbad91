"""The steepest step of each norm: the direction of unit norm along which a linear function grows fastest.

For the gradient g of one sample: sign(g) for the infinity norm, g/‖g‖₂ for the 2-norm, and for the 1-norm the unit
vector of the largest |g_i| with its sign. Along it a linear function grows by the dual norm of g.
"""

from __future__ import annotations

import torch
from torch import Tensor

from excite._core.checks import Norm
from excite._core.layout import Layout


def steepest(gradient: Tensor, norm: Norm, layout: Layout, samples: int) -> Tensor:
    """Unit steps per sample, in the layout of `gradient`; zero where the gradient of a sample is zero."""
    if norm == "inf":
        return gradient.sign()
    rows = layout.by_sample(gradient, samples)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if norm == "2":
        # Scaled by the largest entry first: squares of tiny gradients underflow.
        largest = rows.abs().amax(1, keepdim=True)
        rows = rows / torch.where(largest > 0, largest, 1)
        length = rows.norm(dim=1, keepdim=True)
        rows = rows / torch.where(length > 0, length, 1)
    else:
        index = rows.abs().argmax(1, keepdim=True)
        rows = torch.zeros_like(rows).scatter_(1, index, rows.gather(1, index).sign())
    return layout.from_samples(rows, gradient)
