"""Interval and linear-relaxation bounds (IBP and CROWN): how small can an output become within a ball?

Interval bounds go forward: every tensor gets a lowest and a highest value. Linear bounds go backward (Zhang et al., 2018): an output
is bounded by a linear function of the input, in which every activation is replaced by a line below or above it (`relaxations`). The
lines need bounds on what the activation reads, which are found in the same way, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from excite._core.checks import Norm
from excite.margin.certificates.relaxations import Lines, interval, lines
from excite.margin.certificates.tape import OperatorTape, TapeStep, add_part
from excite.margin.problem import MarginProblem, column, length

Method = Literal["interval", "linear"]
_MAX_TIGHTENED = 1024  # units per point and activation whose interval is replaced by a linear bound
_DUAL: dict[Norm, Norm] = {"inf": "1", "2": "2", "1": "inf"}


@dataclass(frozen=True)
class Ball:
    """Inputs within `radius` (P,) of the points x (P, ...) in `norm`, between `low` and `high`, which hold them in a box."""

    x: Tensor
    radius: Tensor
    norm: Norm
    low: Tensor
    high: Tensor

    def smallest(self, coefficients: Tensor, points: Tensor) -> Tensor:
        """(R,): a lower bound on the linear functions with these coefficients (R, ...) on the balls of `points` (R,)."""
        low, high = self.low[points], self.high[points]
        box = (coefficients * (low + high) / 2 - coefficients.abs() * (high - low) / 2).flatten(1).sum(1)
        if self.norm == "inf":
            return box
        center = (coefficients * self.x[points]).flatten(1).sum(1)
        return torch.maximum(box, center - self.radius[points] * length(coefficients, _DUAL[self.norm]))


def make_ball(problem: MarginProblem, radius: Tensor) -> Ball:
    """The perturbations of size up to `radius` (P,) that a problem allows, in float64."""
    x, constraint, radius = problem.x.double(), problem.constraint, radius.double()
    edge = column(radius, x)
    low, high = x - edge, x + edge
    if constraint.low is not None and constraint.high is not None:
        low, high = torch.maximum(low, x + constraint.low.double()), torch.minimum(high, x + constraint.high.double())
    return Ball(x, radius, constraint.norm, low, high)


class Relaxation:
    """The lines around all activations of a tape on balls around as many points as the tape has rows.

    Attributes:
        read: by activation, the lowest and highest values (P, ...) of what it reads.
    """

    def __init__(self, tape: OperatorTape, ball: Ball, method: Method):
        self.tape, self.ball, self.method = tape, ball, method
        self.read: dict[Node, tuple[Tensor, Tensor]] = {}
        self._lines: dict[Node, Lines] = {}
        self._pools: dict[Node, tuple[Tensor, Tensor, Tensor]] = {}
        self._steps = list(tape.steps.values())
        self._place = {step.node: i for i, step in enumerate(self._steps)}
        values: dict[Node, Any] = {tape.input: (ball.low, ball.high)}
        with torch.no_grad():
            for step in self._steps:
                values[step.node] = self._forward(step, values)
        self.outputs = values[tape.output]

    # -- forward -------------------------------------------------------------------------------------------------------
    def _forward(self, step: TapeStep, values: dict[Node, Any]) -> Any:
        if step.name == "getitem":
            return values[step.inputs[0]][step.node.args[1]]
        if step.affine:
            middle = {node: (values[node][0] + values[node][1]) / 2 for node in step.inputs}
            half_width = {node: (values[node][1] - values[node][0]) / 2 for node in step.inputs}
            return _around(self.tape.call(step, middle), self.tape.call(step, half_width, magnitude=True))
        low, high = values[step.inputs[0]]
        if step.pool:
            low, high, pooled = self._pool(step, low, high)
            return [(low, high), (pooled, pooled)]
        assert step.activation is not None
        tightened = self.method == "linear" or self.tape.is_affine(step.inputs[0])
        low, high = self._tightened(step, low, high) if tightened else (low, high)
        values[step.inputs[0]] = (low, high)
        self.read[step.node] = low, high
        g, rest = self.function(step), tuple(step.node.args[1:])
        self._lines[step.node] = lines(step.activation, g, rest, low, high)
        return interval(step.activation, g, rest, low, high)

    def function(self, step: TapeStep) -> Callable[[Tensor], Tensor]:
        """The activation as a function of one tensor."""
        return lambda t: step.node.target(t, *step.node.args[1:], **step.node.kwargs)  # type: ignore[operator]

    def _pool(self, step: TapeStep, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Bounds of a maximum; kept for the way back: the lower bounds, whose maxima choose, where the choice is certain, the upper."""
        kernel, *rest = step.node.args[1:]
        minimum, index = step.node.target(low, kernel, *rest)  # type: ignore[operator]
        maximum = step.node.target(high, kernel, *rest)[0]  # type: ignore[operator]
        certain = minimum >= _others(high, index, kernel, rest)
        self._pools[step.node] = low, certain, maximum
        return minimum, maximum, index

    def _tightened(self, step: TapeStep, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Linear bounds in place of the intervals of units that an activation bends."""
        assert step.activation is not None
        if self.tape.is_affine(step.inputs[0]):
            return self._affine_bounds(step.inputs[0], low, high)
        bent = high > low
        if step.activation.kinks is not None:
            kinks = step.activation.kinks(*step.node.args[1:])
            bent &= torch.stack([(low < kink) & (high > kink) for kink in kinks]).any(0)
        if int(bent.sum()) > _MAX_TIGHTENED * len(low):
            return low, high
        bent_units = torch.nonzero(bent.flatten(1))
        low, high = low.clone(), high.clone()
        for sign, target in ((1.0, low), (-1.0, high)):
            flat = target.flatten(1)
            for chunk in bent_units.split(self.tape.rows) if len(bent_units) else ():
                coefficients = torch.zeros(len(chunk), flat.shape[1], dtype=torch.float64, device=flat.device)
                coefficients[torch.arange(len(chunk), device=flat.device), chunk[:, 1]] = sign
                tightened = self.smallest(coefficients.reshape(len(chunk), *low.shape[1:]), chunk[:, 0], step.inputs[0])
                known = flat[chunk[:, 0], chunk[:, 1]]
                better = torch.maximum(known, tightened) if sign > 0 else torch.minimum(known, -tightened)
                flat[chunk[:, 0], chunk[:, 1]] = better
            target.copy_(flat.reshape(target.shape))
        crossed = low > high  # by rounding
        middle = (low + high) / 2
        return torch.where(crossed, middle, low), torch.where(crossed, middle, high)

    def _affine_bounds(self, node: Node, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Bounds of an affine function of the input: intervals are exact in boxes, other norms need that of its coefficients."""
        if self.ball.norm == "inf":
            return low, high
        center = self.tape.values(self.ball.x)[node]
        deviation = column(self.ball.radius, center) * self.tape.coefficient_norms(node, _DUAL[self.ball.norm])
        return torch.maximum(low, center - deviation), torch.minimum(high, center + deviation)

    # -- backward ------------------------------------------------------------------------------------------------------
    def smallest(self, coefficients: Tensor, points: Tensor, node: Node | None = None) -> Tensor:
        """(R,): lower bounds on Σ coefficients · value of `node`, by default the output, on the balls of `points` (R,)."""
        result = []
        for chunk, at in zip(coefficients.split(self.tape.rows), points.split(self.tape.rows)):
            missing = self.tape.rows - len(chunk)
            chunk = F.pad(chunk.double(), (0, 0) * (chunk.dim() - 1) + (0, missing))
            result.append(self._backward(chunk, F.pad(at, (0, missing)), node or self.tape.output)[: len(at)])
        return torch.cat(result)

    def _backward(self, coefficients: Tensor, points: Tensor, node: Node) -> Tensor:
        pending: dict[Node, Any] = {node: coefficients}
        constant = coefficients.new_zeros(len(coefficients))
        last = self._place.get(node, -1)
        for step in reversed(self._steps[: last + 1]):
            if step.node not in pending:
                continue
            weights = pending.pop(step.node)
            if step.name == "getitem":
                add_part(pending.setdefault(step.inputs[0], {}), step.node.args[1], weights)
                continue
            back, added = self._through(step, weights, points)
            constant = constant + added
            for input_node, value in back.items():
                add_part(pending, input_node, value)
        if self.tape.input in pending:
            constant = constant + self.ball.smallest(pending[self.tape.input], points)
        return constant

    def _through(self, step: TapeStep, weights: Any, points: Tensor) -> tuple[dict[Node, Tensor], Tensor]:
        if step.affine:
            return self.tape.transpose(step, weights)
        if step.pool:
            weights = weights[0]
            low, certain, maximum = (bound[points] for bound in self._pools[step.node])
            chosen = torch.where((weights > 0) | certain, weights, 0.0)
            with torch.enable_grad():
                leaf = low.requires_grad_()
                pooled = step.node.target(leaf, *step.node.args[1:])[0]  # type: ignore[operator]
                (back,) = torch.autograd.grad(pooled, leaf, chosen)
            return {step.inputs[0]: back}, ((weights - chosen) * maximum).flatten(1).sum(1)
        around = self._lines[step.node].rows(points)
        positive, negative = weights.clamp_min(0), weights.clamp_max(0)
        back = positive * around.below_slope + negative * around.above_slope
        return {step.inputs[0]: back}, (positive * around.below + negative * around.above).flatten(1).sum(1)


def _around(middle: Any, half_width: Any) -> Any:
    if isinstance(middle, tuple | list):
        return [(m - s, m + s) for m, s in zip(middle, half_width)]
    return middle - half_width, middle + half_width


def _others(high: Tensor, chosen: Tensor, kernel: Any, rest: list[Any]) -> Tensor:
    """The largest of `high` in each window of a pooling of two dimensions without the element that was chosen."""
    stride, padding, dilation = (*rest, *([kernel], [0, 0], [1, 1])[len(rest) :])[:3] if len(rest) < 3 else rest[:3]
    unfolded = [
        list(value) * 2 if len(value) == 1 else list(value) for value in (kernel, stride or kernel, padding, dilation)
    ]
    kernel, stride, padding, dilation = unfolded
    n, c, rows, columns = high.shape
    places = torch.arange(rows * columns, dtype=torch.float64, device=high.device).reshape(1, 1, rows, columns)
    edge = (padding[1], padding[1], padding[0], padding[0])
    padded, numbers = F.pad(high, edge, value=-torch.inf), F.pad(places, edge, value=-1.0)

    def windows(t: Tensor) -> Tensor:
        for axis in (2, 3):
            i = axis - 2
            span = dilation[i] * (kernel[i] - 1) + 1
            t = t.unfold(axis, span, stride[i])[..., :: dilation[i]]
        return t

    values = windows(padded).expand(n, c, *chosen.shape[2:], *kernel).flatten(4)
    own = windows(numbers).expand(n, c, *chosen.shape[2:], *kernel).flatten(4) == chosen[..., None]
    return values.masked_fill(own, -torch.inf).amax(-1)
