"""The share of points that are labelled right."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from excite._core.calls import pick_output
from excite._core.preserve import evaluating

Predict = Callable[[Tensor], Tensor]
_BATCH = 1000


def decisions(model: nn.Module, threshold: float = 0.5) -> Predict:
    """Labels of a model: 1 where a scalar output is above `threshold`, the largest of several outputs."""

    def predict(x: Tensor) -> Tensor:
        f = pick_output(model(x))
        return (f.reshape(-1) > threshold).long() if f.dim() == 1 or f.shape[1] == 1 else f.argmax(1)

    return predict


def accuracy(model: nn.Module, predict: Predict, x: Tensor, y: Tensor, most: int | None = None) -> float:
    """Share of right labels, with the model in evaluation mode and left as it was; of `most` points, spread evenly."""
    x, y = spread_evenly(x, y, most)
    return correct(model, predict, x, y) / len(x)


def spread_evenly(x: Tensor, y: Tensor, most: int | None) -> tuple[Tensor, Tensor]:
    """At most `most` of the points, from the first to the last."""
    if most is None or len(x) <= most:
        return x, y
    # On the CPU, so that the same points are chosen on every device.
    at = torch.linspace(0, len(x) - 1, most, dtype=torch.float64).round().long().to(x.device)
    return x[at], y[at]


@torch.no_grad()
def correct(model: nn.Module, predict: Predict, x: Tensor, y: Tensor) -> int:
    """How many labels are right."""
    right = 0
    with evaluating(model):
        for part, labels in zip(x.split(_BATCH), y.split(_BATCH)):
            right += int((predict(part) == labels.reshape(-1)).sum())
    return right
