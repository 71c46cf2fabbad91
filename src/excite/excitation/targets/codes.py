"""Many classes by equidistant codes (section 7.1)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from excite._core.background import DeferredChecks
from excite._core.checks import check_count
from excite.errors import ModelError
from excite.excitation.codes import codes, nearest
from excite.excitation.direction import wide
from excite.excitation.targets.binary import check_loss
from excite.excitation.targets.labels import class_fractions, class_labels, entropy
from excite.excitation.targets.target import Loss, Target


class Codes(Target):
    """m classes by m outputs, or by m − 1: errors ‖f − z_y‖² from the code of the label, decision for the nearest code.

    With the cross-entropy as loss the m outputs are logits; they decide by their argmax either way.
    """

    def __init__(self, classes: int, loss: Loss = "squared"):
        self.classes = check_classes(classes)
        self.loss_name = check_loss(loss)
        self._made: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def outputs(self, returned: Tensor, batch: int) -> Tensor:
        """Returns the model's outputs as (B, m), or (B, m − 1) for the squared error."""
        m = self.classes
        if m == 2 and returned.shape == (batch,):
            returned = returned[:, None]
        allowed = (m,) if self.loss_name == "cross-entropy" else (m, m - 1)
        if returned.dim() == 2 and returned.shape[0] == batch and returned.shape[1] in allowed:
            return returned
        shapes = " or ".join(f"({batch}, {k})" for k in allowed)
        raise ModelError(
            f"classes={m} with the {self.loss_name} loss needs outputs of shape {shapes}; the model returned "
            f"{tuple(returned.shape)}: give it {m} outputs, or pick them with output="
        )

    def labels(self, y: object, batch: int, deferred: DeferredChecks | None = None) -> Tensor:
        """Returns the labels as class indices (B,)."""
        return class_labels(y, batch, self.classes, deferred)

    def errors(self, output: Tensor, labels: Tensor) -> Tensor:
        """Loss per sample, (B,): cross-entropy, or the squared distance from the code of its class."""
        if self.loss_name == "cross-entropy":
            return F.cross_entropy(output, labels, reduction="none")
        return (output - self.points(output)[labels]).square().sum(1)

    def decide(self, output: Tensor) -> Tensor:
        """Returns the class whose code is nearest to each output, (B,)."""
        return nearest(output, self.points(output))

    def confusion(self, output: Tensor, labels: Tensor) -> Tensor:
        """How far the best other class is above the label's, (B,): positive where the decision is wrong."""
        scores = output @ self.points(output).T  # codes are equally long: the nearest has the largest product
        own = F.one_hot(labels, self.classes).bool()
        return scores.masked_fill(own, -math.inf).amax(1) - scores.gather(1, labels[:, None]).squeeze(1)

    def trivial(self, labels: Tensor) -> Tensor:
        """Returns the loss of the best constant output."""
        if self.loss_name == "cross-entropy":
            return entropy(labels, self.classes)
        return (
            1 - class_fractions(labels, self.classes).square().sum()
        ) / 2  # half the mean squared distance of two codes drawn at random

    def start(self, output: Tensor) -> Tensor:
        """From the second nearest code to the nearest: along the decision at stake, and of length 1 as it is."""
        output = output.to(wide(output))
        points = self.points(output)
        first, second = (output @ points.T).topk(2, 1).indices.unbind(1)
        return points[first] - points[second]

    def points(self, output: Tensor) -> Tensor:
        """The codes on the device and in the precision of `output`; made once, not copied there at every step."""
        key = (output.shape[1], output.dtype, output.device)
        if key not in self._made:
            self._made[key] = codes(self.classes, output.shape[1]).to(output)
        return self._made[key]

    def __repr__(self) -> str:
        return f"classes={self.classes}, loss={self.loss_name!r}"


def check_classes(classes: object) -> int:
    """Returns the number of classes, at least 2, or raises an InputError."""
    return check_count(classes, "classes", 2)
