"""Accuracy of a model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from excite._core.calls import pick_output
from excite._core.checks import check_count, check_model, check_real, check_tensor, model_errors, shown
from excite._core.compatibility import renamed_keywords
from excite._core.preserve import eval_mode
from excite.errors import InputError, ModelError

Predict = Callable[[Tensor], Tensor]
_BATCH = 1000


def decisions(model: nn.Module, threshold: float = 0.5) -> Predict:
    """Builds a function from x to labels: 1 where a scalar output is above `threshold`, argmax of several outputs."""

    def predict(x: Tensor) -> Tensor:
        f = check_real(pick_output(model(x)))
        if not f.dim() or len(f) != len(x) or not f.numel():
            raise ModelError(f"expected one row of outputs per point, ({len(x)}, ...); got {tuple(f.shape)}")
        return (f.reshape(-1) > threshold).long() if f.dim() == 1 or f.shape[1] == 1 else f.argmax(1)

    return predict


@renamed_keywords(most="max_points")
@model_errors
def accuracy(model: nn.Module, predict: Predict, x: Tensor, y: Tensor, max_points: int | None = None) -> float:
    """Fraction of points with the right label, with the model in evaluation mode; its modes are restored.

    Args:
        model: Model.
        predict: Function from x to labels.
        x: Points, (N, ...).
        y: Labels, (N,).
        max_points: Maximum number of points to use, spread evenly over all.

    Returns:
        Accuracy between 0 and 1.

    Raises:
        InputError: If points and labels do not match, or `predict` does not return one label per point.
        ModelError: If the model raises an error on the points, such as for inputs of another shape.

    Example:
        >>> accuracy(model, lambda x: (model(x)[:, 0] > 0.5).long(), x, y)
    """
    check_model(model)
    check_tensor(x, "points", floating=False), check_tensor(y, "labels", 1, 2, floating=False)
    if not x.dim() or not len(x) or len(x) != y.numel():
        raise InputError(f"expected one label per point, at least one; got {tuple(x.shape)} and {tuple(y.shape)}")
    if not callable(predict):
        raise InputError(f"predict: expected a function of the points that returns labels; got {shown(predict)}")
    x, y = spread_evenly(x, y, None if max_points is None else check_count(max_points, "max_points"))
    return correct(model, predict, x, y) / len(x)


def spread_evenly(x: Tensor, y: Tensor, max_points: int | None) -> tuple[Tensor, Tensor]:
    """Returns at most `max_points` of the points, evenly spaced from the first to the last."""
    if max_points is None or len(x) <= max_points:
        return x, y
    # On the CPU, so that the same points are chosen on every device.
    at = torch.linspace(0, len(x) - 1, max_points, dtype=torch.float64).round().long().to(x.device)
    return x[at], y[at]


@torch.no_grad()
def correct(model: nn.Module, predict: Predict, x: Tensor, y: Tensor) -> int:
    """Returns the number of right labels."""
    right = 0
    with eval_mode(model):
        for batch, labels in zip(x.split(_BATCH), y.split(_BATCH)):
            decided = predict(batch)
            if not isinstance(decided, Tensor) or decided.numel() != len(batch):
                raise InputError(f"predict: expected one label for each of {len(batch)} points; got {shown(decided)}")
            right += int((decided.reshape(-1) == labels.reshape(-1)).sum())
    return right
