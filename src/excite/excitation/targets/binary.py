"""Two classes by one output and a threshold."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from excite._core.background import DeferredChecks
from excite._core.checks import check_number, shown
from excite._core.preserve import capturing
from excite.errors import InputError, ModelError
from excite.excitation.targets.labels import accepted, entropy, label_tensor
from excite.excitation.targets.target import Loss, Target


class Binary(Target):
    """One output f, labels 0 and 1, class 1 where f > threshold. Errors: (f − y)², or the binary cross-entropy of logits."""

    def __init__(self, threshold: float | None = None, loss: Loss = "squared"):
        self.loss_name = check_loss(loss)
        self.threshold = check_threshold(threshold, self.loss_name)

    def outputs(self, returned: Tensor, batch: int) -> Tensor:
        """Returns the model's outputs as (B,)."""
        return scalar(returned, batch)

    def labels(self, y: object, batch: int, deferred: DeferredChecks | None = None) -> Tensor:
        """Returns the labels (B,), each 0 or 1."""
        y = label_tensor(y, batch, "0 and 1")
        if y.is_complex():
            raise InputError(f"labels: expected real numbers, 0 and 1; got {y.dtype}")
        return y if y.dtype == torch.bool or (y.is_cuda and capturing()) else accepted(y, 2, _not_binary, deferred)

    def errors(self, output: Tensor, labels: Tensor) -> Tensor:
        """Loss per sample, (B,)."""
        return binary_errors(output, labels, self.loss_name)

    def decide(self, output: Tensor) -> Tensor:
        """Returns the class of each output, (B,): 1 above the threshold."""
        return (output > self.threshold).long()

    def confusion(self, output: Tensor, labels: Tensor) -> Tensor:
        """How far the output is on the wrong side of the threshold, (B,): positive where the decision is wrong."""
        return (self.threshold - output) * (2 * labels.to(output.dtype) - 1)

    def trivial(self, labels: Tensor) -> Tensor:
        """Returns the loss of the best constant output."""
        if self.loss_name == "cross-entropy":
            return entropy(labels.long(), 2)
        return labels.float().var(correction=0)

    def __repr__(self) -> str:
        return f"threshold={self.threshold}, loss={self.loss_name!r}"


def scalar(output: Tensor, batch: int) -> Tensor:
    """A scalar output per sample as (B,); anything else is refused."""
    if output.shape == (batch,):
        return output
    if output.shape == (batch, 1):
        return output.squeeze(1)
    if output.dim() and output.shape[0] != batch:
        raise ModelError(
            f"expected one output per sample, ({batch},) or ({batch}, 1); the model returned {tuple(output.shape)}"
        )
    raise ModelError(
        f"expected a scalar output per sample, ({batch},) or ({batch}, 1); the model returned {tuple(output.shape)}: "
        "give classes= for many classes, give the model one output, or pick one with output="
    )


def binary_errors(output: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    """(f − y)², or −log of the probability that the logit f gives to y, entry by entry."""
    labels = labels.to(output.dtype)
    if loss == "squared":
        return (output - labels).square()
    return F.binary_cross_entropy_with_logits(output, labels, reduction="none")


def check_loss(loss: object) -> Loss:
    """Returns the name of a loss, or raises an InputError."""
    if loss == "squared":
        return "squared"
    if loss == "cross-entropy":
        return "cross-entropy"
    raise InputError(f"loss: expected 'squared' or 'cross-entropy'; got {shown(loss)}")


def check_threshold(threshold: object, loss: Loss) -> float:
    """0.5 for the targets 0 and 1 of the squared error; the logits of the cross-entropy decide at 0, and only there."""
    if threshold is None:
        return 0.5 if loss == "squared" else 0.0
    threshold = check_number(threshold, "threshold")
    if loss == "cross-entropy" and threshold != 0:
        raise InputError(f"threshold: the cross-entropy reads outputs as logits, which decide at 0; got {threshold}")
    return threshold


def _not_binary(label: float) -> str:
    return (
        f"labels: expected 0 and 1; got {label}: map the two classes to 0 and 1, give classes= for more, or "
        "targets='values' for a regression"
    )
