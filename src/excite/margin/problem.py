"""The minimum-norm problem of N points: the smallest perturbation d within a constraint that changes the model's decision.

    minimize ‖d‖  subject to  low ≤ d ≤ high  and  decision(x + d) ≠ label

`Decision` evaluates the model, `Constraint` has the geometry, `AdversarialPerturbations` the best solutions. Every search of
this package works on a `MarginProblem`, which holds them together, and on `rows` of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from excite._core.calls import Pick, pick_output
from excite._core.checks import Norm
from excite.errors import ModelError


# -- decisions ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Decision:
    """The decisions of a model at N points with labels (N,).

    The logit margin of a point is positive while the model decides for its label: f − t or t − f for scalar outputs,
    f_label − f_other for vectors, where other is the class with the smallest (f_label − f_j) / scale_j. With scale_j
    the dual norm of the gradient of that difference, it is the class whose boundary is nearest to first order, which
    need not be the one with the second largest output. With `target` it is that class. It is multiplied by `unit`.
    A point is adversarial where the model decides otherwise, by exactly the user's rule: f > t, argmax.
    With `channels_last` the model gets images in that memory format, which convolutions and pooling on CPUs are faster in.
    """

    model: nn.Module
    output: Pick
    threshold: float
    labels: Tensor
    classes: int  # 1 for scalar outputs
    scale: Tensor | None = None  # (N, classes)
    target: Tensor | None = None  # (N,)
    channels_last: bool = False
    unit: float = 1.0

    def rows(self, index: Tensor) -> Decision:
        """The same for some of the points."""
        scale = None if self.scale is None else self.scale[index]
        target = None if self.target is None else self.target[index]
        return replace(self, labels=self.labels[index], scale=scale, target=target)

    def outputs(self, z: Tensor) -> Tensor:
        """(N,) for scalar outputs, (N, m) for vectors."""
        f = self.model(z.contiguous(memory_format=torch.channels_last) if self.channels_last else z)
        if self.output is not None:  # without a choice the outputs of the clean points have been checked
            f = pick_output(f, self.output)
        return f.reshape(len(z)) if self.classes == 1 else f  # type: ignore[no-any-return]

    def predicted(self, f: Tensor) -> Tensor:
        """(N,): the classes decided for."""
        return (f > self.threshold).long() if self.classes == 1 else f.argmax(1)

    def decided(self, z: Tensor) -> Tensor:
        """(N,): the classes decided for at z."""
        with torch.no_grad():
            return self.predicted(self.outputs(z))

    def logit_margin(self, f: Tensor) -> Tensor:
        """(N,): how far the outputs are from changing the decision, times `unit`."""
        margin = self._logit_margin(f)
        return margin if self.unit == 1 else margin * self.unit

    def _logit_margin(self, f: Tensor) -> Tensor:
        if self.classes == 1:
            return torch.where(self.labels == 1, f - self.threshold, self.threshold - f)
        own = f.gather(1, self.labels[:, None])
        if self.target is not None:
            return (own - f.gather(1, self.target[:, None]))[:, 0]
        own_column = torch.zeros_like(f, dtype=torch.bool).scatter_(1, self.labels[:, None], True)
        ahead = (own - f).detach()
        weighed = (ahead if self.scale is None else ahead / self.scale).masked_fill(own_column, math.inf)
        return (own - f.gather(1, weighed.argmin(1, keepdim=True)))[:, 0]

    def evaluate(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Logit margin, in the precision of z, and adversarial (N,) at z, without gradients."""
        with torch.no_grad():
            f = self.outputs(z)
            # Where outputs overflow there is no decision: such a point is not adversarial.
            return self.logit_margin(f).to(z.dtype), (self.predicted(f) != self.labels) & _finite(f)

    def gradients(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logit margin, adversarial (N,) and the gradient of the logit margin with respect to z; none of any weight.

        Logit margin and gradient are in the precision of z, whatever that of the outputs: the search works in it.
        """
        z = z.detach().requires_grad_()
        f = self.outputs(z)
        logit_margin = self.logit_margin(f)
        gradient = _gradient(logit_margin, z)
        adversarial = (self.predicted(f.detach()) != self.labels) & _finite(f.detach())
        return logit_margin.detach().to(z.dtype), adversarial, torch.nan_to_num(gradient, 0.0, 0.0, 0.0)

    def differences(self, z: Tensor, classes: Tensor) -> list[Tensor]:
        """Gradients of f_label − f_j, times `unit`, at z for j in the columns of `classes` (N, k)."""
        z = z.detach().requires_grad_()
        f = self.outputs(z)
        f = f if self.unit == 1 else f * self.unit
        own = f.gather(1, self.labels[:, None])[:, 0]
        last = classes.shape[1] - 1
        return [
            _gradient(own - f.gather(1, classes[:, k : k + 1])[:, 0], z, retain_graph=k < last) for k in range(last + 1)
        ]


@dataclass(frozen=True, kw_only=True)
class FeatureDecision(Decision):
    """Decisions by features·weight + bias, with weights (N, features) and bias (N,) of each point; class 1 where positive.

    The features are the inputs of a linear layer of the model.
    """

    layer: nn.Linear
    weight: Tensor
    bias: Tensor

    def rows(self, index: Tensor) -> FeatureDecision:
        """The same for some of the points."""
        fewer = super().rows(index)
        assert isinstance(fewer, FeatureDecision)
        return replace(fewer, weight=self.weight[index], bias=self.bias[index])

    def outputs(self, z: Tensor) -> Tensor:
        """(N,): features·weight + bias."""
        return (features(self.model, self.layer, z, self.output) * self.weight).sum(1) + self.bias


@contextmanager
def _inputs_of(layer: nn.Linear) -> Iterator[list[Tensor]]:
    """The layer's inputs in the passes inside this context; the hook is removed also after an exception."""
    inputs: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    try:
        yield inputs
    finally:
        hook.remove()


def features(model: nn.Module, layer: nn.Linear, x: Tensor, output: Pick = None) -> Tensor:
    """The inputs (N, features) of the layer in a pass of x; `output` is called as in every pass, since it may end the search."""
    with _inputs_of(layer) as inputs:
        returned = model(x)
    if output is not None:
        pick_output(returned, output)
    return inputs[-1].to(x.dtype)


def unit_of_outputs(f: Tensor, threshold: float) -> float:
    """1 for outputs of a usual size; else the power of two that brings them near 1.

    The squares of gradients of outputs above 1e19 or below 1e-19 leave the range of float32.
    """
    size = float((f - threshold if f.dim() == 1 else f).abs().amax()) if f.numel() else 1.0
    return 1.0 if size == 0 or 1e-10 < size < 1e10 else 2.0 ** -max(-120, min(120, round(math.log2(size))))


def _finite(f: Tensor) -> Tensor:
    return torch.isfinite(f) if f.dim() == 1 else torch.isfinite(f).all(1)


def _gradient(logit_margin: Tensor, z: Tensor, retain_graph: bool = False) -> Tensor:
    gradient = None
    if logit_margin.requires_grad:
        (gradient,) = torch.autograd.grad(logit_margin.sum(), z, retain_graph=retain_graph, allow_unused=True)
    if gradient is None:
        raise ModelError(
            "expected an output that depends on the input through operations with gradients; found no gradient path "
            "(detach, no_grad, argmax or a non-tensor step inside the model?): remove it, or give the tensor before it "
            "as output="
        )
    return gradient.contiguous()


# -- constraints -------------------------------------------------------------------------------------------------------
def column(values: Tensor, like: Tensor) -> Tensor:
    """(N,) as (N, 1, ..., 1), to be broadcast against `like`."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


def length(d: Tensor, norm: Norm) -> Tensor:
    """(N,): the norm of each row of d (N, ...)."""
    flat = d.flatten(1)  # torch's vector_norm is several times slower for the norms inf and 1
    if norm == "2":
        result: Tensor = torch.linalg.vector_norm(flat, dim=1)
        return result
    return flat.abs().amax(1) if norm == "inf" else flat.abs().sum(1)


@dataclass(frozen=True)
class Constraint:
    """The perturbations d of N points with low ≤ d ≤ high, measured in `norm`.

    `low` and `high` are None when there are no bounds. They are rounded inwards, so that x + d never leaves the bounds
    in floating point either. `max_radius` (N,) is the norm of the largest perturbation worth trying. `partial`: some
    coordinates have no bounds (infinite ones), so that there are no corners to go to.
    """

    norm: Norm
    low: Tensor | None
    high: Tensor | None
    max_radius: Tensor
    partial: bool = False

    @property
    def init_radius(self) -> Tensor:
        """(N,): the largest first radius; without bounds `max_radius` is a million times what is usual."""
        return self.max_radius if self.low is not None and not self.partial else self.max_radius / 1e6

    def rows(self, index: Tensor) -> Constraint:
        """The same for some of the points."""
        if self.low is None or self.high is None:
            return replace(self, max_radius=self.max_radius[index])
        return replace(self, low=self.low[index], high=self.high[index], max_radius=self.max_radius[index])

    def length(self, d: Tensor) -> Tensor:
        """(N,): the norm of each perturbation."""
        return length(d, self.norm)

    def dual_norm(self, gradient: Tensor) -> Tensor:
        """(N,): the dual norm of the gradients, the fastest change per unit of the norm."""
        return length(gradient, _DUAL[self.norm])

    def direction(self, gradient: Tensor) -> Tensor:
        """The perturbation of norm one along which a function with this gradient grows fastest.

        For "1" that would be one coordinate alone; here the steepest sixteenth of them move by the same amount.
        """
        if self.norm == "inf":
            return gradient.sign()
        if self.norm == "1":
            return _steepest(gradient)
        return gradient / column(length(gradient, "2").clamp_min(torch.finfo(gradient.dtype).tiny), gradient)

    def scaled(self, gradient: Tensor) -> Tensor:
        """The gradient, scaled to a root mean square of one ("inf") or to norm one."""
        if self.norm == "1":
            return gradient / column(length(gradient, "1").clamp_min(torch.finfo(gradient.dtype).tiny), gradient)
        size = length(gradient, "2").clamp_min(torch.finfo(gradient.dtype).tiny)
        if self.norm == "inf":
            size = size / gradient.shape[1:].numel() ** 0.5
        return gradient / column(size, gradient)

    def clip(self, d: Tensor) -> Tensor:
        """d cut to the bounds."""
        if self.low is None or self.high is None:
            return d
        return torch.clamp(d, self.low, self.high)

    def active(self, gradient: Tensor, d: Tensor) -> Tensor:
        """The gradient without the coordinates in which descent from d would leave the bounds at once."""
        if self.low is None or self.high is None:
            return gradient
        grows = gradient > 0
        stuck = (grows & (d <= self.low)) | (~grows & (d >= self.high))
        return gradient.masked_fill(stuck, 0.0)

    def project(self, d: Tensor, radius: Tensor) -> Tensor:
        """d brought into the ball of `radius` (N,), then into the bounds; for "1" into both at once."""
        if self.norm == "1" and self.low is not None and self.high is not None:
            return _soft(d, radius, self.low, self.high)
        return self.clip(self.shrink(d, radius))

    def vertex(self, gradient: Tensor, radius: Tensor) -> Tensor:
        """Norm "1": the perturbation of norm at most `radius` (N,) within the bounds along which this gradient falls most.

        The coordinates with the largest gradients go to their bounds, one after the other, until the radius is used up.
        """
        flat = gradient.flatten(1)
        order = flat.abs().argsort(1, descending=True)
        if self.low is None or self.high is None:
            remaining = radius[:, None].expand_as(flat)
        else:
            remaining = torch.where(gradient > 0, -self.low, self.high).flatten(1).gather(1, order)
        used = remaining.cumsum(1) - remaining
        amount = torch.minimum(remaining, (radius[:, None] - used).clamp_min(0))
        size = torch.zeros_like(flat).scatter_(1, order, amount).reshape(gradient.shape)
        return -gradient.sign() * size

    def shrink(self, d: Tensor, radius: Tensor) -> Tensor:
        """The nearest perturbation of norm at most `radius`: coordinates are cut ("inf"), scaled ("2") or lessened by the same ("1").

        From radius = ‖d‖ down to 0 this is a path from d to zero that stays within the bounds if d does. Cutting leaves
        the coordinates that the bounds already hold back as they are; scaling them too would waste them.
        """
        if self.norm == "inf":
            edge = column(radius, d)
            return torch.clamp(d, -edge, edge)
        if self.norm == "1":
            return _soft(d, radius)
        size = self.length(d).clamp_min(torch.finfo(d.dtype).tiny)
        return d * column((radius / size).clamp(max=1.0), d)


_DUAL: dict[Norm, Norm] = {"inf": "1", "2": "2", "1": "inf"}


def _steepest(gradient: Tensor) -> Tensor:
    """Signs of the sixteenth of the coordinates with the largest gradients, scaled to a sum of one; zeros are left out."""
    flat = gradient.flatten(1)
    size = flat.abs()
    last = size.topk(max(1, flat.shape[1] // 16), dim=1).values[:, -1:]
    signs = torch.where(size >= last, flat.sign(), 0.0)
    return (signs / signs.abs().sum(1, keepdim=True).clamp_min(1)).reshape(gradient.shape)


def _soft(d: Tensor, radius: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    """The nearest d with Σ|d| ≤ radius within the bounds: all coordinates lessened by the same, then cut; by Newton's method."""
    size = d.abs()
    limit = torch.full_like(d, math.inf) if low is None or high is None else torch.where(d > 0, high, -low)
    by, left = torch.zeros_like(radius), torch.minimum(size, limit)
    for _ in range(6):
        moving = ((left > 0) & (left < limit)).flatten(1).sum(1).clamp_min(1)
        by = (by + (left.flatten(1).sum(1) - radius) / moving).clamp_min(0)
        left = torch.minimum((size - column(by, d)).clamp_min(0), limit)
    total = left.flatten(1).sum(1).clamp_min(torch.finfo(d.dtype).tiny)
    return d.sign() * left * column((radius / total).clamp(max=1.0), d)


def make_constraint(x: Tensor, norm: Norm, bounds: tuple[Tensor, Tensor] | None) -> Constraint:
    """The constraint around x (N, ...). Without bounds `max_radius` is a million times the spread of the data.

    Integer inputs cannot be perturbed: their largest radius is 0.
    """
    if not x.is_floating_point():
        return Constraint(norm, None, None, torch.zeros(len(x), device=x.device))
    if bounds is None:
        extent = length(x - x.mean(0, keepdim=True), norm).max()
        size = torch.where(extent > 0, extent, length(x, norm).max()).clamp_min(1e-3)
        return Constraint(norm, None, None, (1e6 * size).expand(len(x)).contiguous())
    lowest, highest = (bound.expand_as(x) for bound in bounds)
    low, high = lowest - x, highest - x
    for _ in range(2):  # x + (high - x) can round past high
        high = torch.where(x + high > highest, torch.nextafter(high, torch.full_like(high, -math.inf)), high)
        low = torch.where(x + low < lowest, torch.nextafter(low, torch.full_like(low, math.inf)), low)
    high, low = high.clamp_min(0), low.clamp_max(0)
    return Constraint(norm, low, high, length(torch.maximum(high, -low), norm))


# -- problems and solutions --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class MarginProblem:
    """Points x (N, ...), the decisions of the model around them, and the perturbations that are allowed."""

    decision: Decision
    x: Tensor
    constraint: Constraint

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, index: Tensor) -> MarginProblem:
        """The same for some of the points."""
        return MarginProblem(self.decision.rows(index), self.x[index], self.constraint.rows(index))


@dataclass
class AdversarialPerturbations:
    """The smallest adversarial perturbations so far: `radius` (N,) is inf and `d` zero where there is none."""

    radius: Tensor
    d: Tensor

    def rows(self, index: Tensor) -> AdversarialPerturbations:
        """Those of some of the points."""
        return AdversarialPerturbations(self.radius[index], self.d[index])

    def update(self, index: Tensor, radius: Tensor, d: Tensor) -> None:
        """Take those of `radius`, `d` for the points `index` that are smaller."""
        better = radius < self.radius[index]
        chosen = index[better]
        self.radius[chosen] = radius[better]
        self.d[chosen] = d[better]


def no_perturbations(x: Tensor) -> AdversarialPerturbations:
    """None found yet for the points x."""
    return AdversarialPerturbations(
        torch.full((len(x),), math.inf, dtype=x.dtype, device=x.device), torch.zeros_like(x)
    )
