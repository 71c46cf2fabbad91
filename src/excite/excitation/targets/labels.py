"""Labels of classes: checked without waiting for a GPU, and how often each class occurs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from excite._core.background import DeferredChecks
from excite._core.checks import check_dense
from excite._core.preserve import capturing
from excite.errors import InputError


def label_tensor(y: object, batch: int, expected: str) -> Tensor:
    """Returns labels as a tensor (B,), or raises an InputError."""
    if not isinstance(y, Tensor):
        raise InputError(f"labels: expected a tensor of {expected}; got {type(y).__name__}")
    if y.shape not in ((batch,), (batch, 1)):
        raise InputError(f"labels: expected shape ({batch},) or ({batch}, 1) for {batch} inputs; got {tuple(y.shape)}")
    return check_dense(y, "labels").reshape(batch).detach()


def class_labels(y: object, batch: int, classes: int, deferred: DeferredChecks | None = None) -> Tensor:
    """Integer labels 0 … m − 1, (B,)."""
    y = label_tensor(y, batch, f"whole numbers from 0 to {classes - 1}")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise InputError(f"labels: expected whole numbers from 0 to {classes - 1}; got {y.dtype}: use y.long()")
    y = y.long()
    return y if y.is_cuda and capturing() else accepted(y, classes, partial(_not_a_class, classes=classes), deferred)


def accepted(y: Tensor, classes: int, problem: Callable[[Any], str], deferred: DeferredChecks | None) -> Tensor:
    """The labels, if all are whole and from 0 to m − 1; otherwise `problem(label)` of one that is not is raised.

    With `deferred`, labels on a GPU are judged without waiting for it. Those that are wrong are changed until then: a label out of
    range would be an index out of range, after which no kernel runs in this process any more.
    """
    if deferred is not None and not y.is_floating_point():
        extremes = torch.stack(torch.aminmax(y))
        deferred.add(extremes, lambda values: next((problem(n) for n in values if not 0 <= n < classes), None))
        return y.clamp(0, classes - 1)
    good = (y == 0) | (y == 1) if y.is_floating_point() else (y >= 0) & (y < classes)  # floating point: of two classes
    if deferred is not None:
        first = (~good).to(torch.uint8).argmax()  # 0 if all are good
        numbers = torch.stack([good.all().to(y.dtype), y.take(first)])
        deferred.add(numbers, lambda values: None if values[0] else problem(values[1]))
        return torch.where(good, y, 0)
    if not bool(good.all()):
        raise InputError(problem(y[~good][0].item()))
    return y


def _not_a_class(label: int, classes: int) -> str:
    return f"labels: classes={classes} expects 0 to {classes - 1}; got {label}: change classes=, or number the classes from 0"


def entropy(labels: Tensor, classes: int) -> Tensor:
    """Entropy of the class fractions, in nats: the cross-entropy of the best constant logits."""
    terms: Tensor = torch.special.entr(class_fractions(labels, classes))
    return terms.sum()


def class_fractions(labels: Tensor, classes: int) -> Tensor:
    """Fraction of each class, (m,), among labels (B,)."""
    ones = torch.ones(len(labels), device=labels.device)
    return torch.zeros(classes, device=labels.device).scatter_add(0, labels, ones) / len(labels)
