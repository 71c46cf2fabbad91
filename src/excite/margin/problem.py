"""What a model decides at a point, and how far, in its outputs, that decision is from changing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from excite._core.calls import Pick, pick_output
from excite.errors import ModelError


@dataclass(frozen=True)
class Decision:
    """The decisions of a model at N points with labels (N,).

    The slack of a point is positive while the model decides for its label: f − t or t − f for scalar outputs,
    f_label − f_other for vectors, where other is the class with the smallest (f_label − f_j) / scale_j. With scale_j
    the dual norm of the gradient of that difference, it is the class whose boundary is nearest to first order, which
    need not be the one with the second largest output.
    A point is broken where the model decides otherwise, by exactly the user's rule: f > t, argmax.
    """

    model: nn.Module
    output: Pick
    threshold: float
    labels: Tensor
    classes: int  # 1 for scalar outputs
    scale: Tensor | None = None  # (N, classes)

    def rows(self, index: Tensor) -> Decision:
        return replace(self, labels=self.labels[index], scale=None if self.scale is None else self.scale[index])

    def outputs(self, z: Tensor) -> Tensor:
        """(N,) for scalar outputs, (N, m) for vectors."""
        f = pick_output(self.model(z), self.output)
        return f.reshape(len(z)) if self.classes == 1 else f

    def chosen(self, f: Tensor) -> Tensor:
        """(N,): the classes decided for."""
        return (f > self.threshold).long() if self.classes == 1 else f.argmax(1)

    def slack(self, f: Tensor) -> Tensor:
        if self.classes == 1:
            return torch.where(self.labels == 1, f - self.threshold, self.threshold - f)
        own = f.gather(1, self.labels[:, None])
        own_column = torch.zeros_like(f, dtype=torch.bool).scatter_(1, self.labels[:, None], True)
        ahead = (own - f).detach()
        weighed = (ahead if self.scale is None else ahead / self.scale).masked_fill(own_column, math.inf)
        return (own - f.gather(1, weighed.argmin(1, keepdim=True)))[:, 0]

    def look(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Slack, in the precision of z, and broken (N,) at z, without gradients."""
        with torch.no_grad():
            f = self.outputs(z)
            # Where outputs overflow there is no decision: such a point is not broken.
            return self.slack(f).to(z.dtype), (self.chosen(f) != self.labels) & _finite(f)

    def slope(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Slack, broken (N,) and the gradient of the slack with respect to z; no gradient of any weight is computed.

        Slack and gradient are in the precision of z, whatever that of the outputs: the search goes on in it.
        """
        z = z.detach().requires_grad_()
        f = self.outputs(z)
        slack = self.slack(f)
        gradient = _gradient(slack, z)
        broken = (self.chosen(f.detach()) != self.labels) & _finite(f.detach())
        return slack.detach().to(z.dtype), broken, torch.nan_to_num(gradient, 0.0, 0.0, 0.0)

    def differences(self, z: Tensor, classes: Tensor) -> list[Tensor]:
        """Gradients of f_label − f_j at z for j in the columns of `classes` (N, k)."""
        z = z.detach().requires_grad_()
        f = self.outputs(z)
        own = f.gather(1, self.labels[:, None])[:, 0]
        last = classes.shape[1] - 1
        return [_gradient(own - f.gather(1, classes[:, k : k + 1])[:, 0], z, keep=k < last) for k in range(last + 1)]


def _finite(f: Tensor) -> Tensor:
    return torch.isfinite(f) if f.dim() == 1 else torch.isfinite(f).all(1)


def _gradient(slack: Tensor, z: Tensor, keep: bool = False) -> Tensor:
    gradient = None
    if slack.requires_grad:
        (gradient,) = torch.autograd.grad(slack.sum(), z, retain_graph=keep, allow_unused=True)
    if gradient is None:
        raise ModelError(
            "expected an output that depends on the input through operations with gradients; found no gradient path "
            "(detach, no_grad, argmax or a non-tensor step inside the model?): remove it, or give the tensor before it "
            "as output="
        )
    return gradient
