"""Operations that copy, combine and select numbers: views, sums, concatenation, pooling.

In the 2-norm a number that is copied n times counts sqrt(n) times; in the infinity norm copies cost nothing.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from excite.wiring.channels.signals import shapes_of
from excite.wiring.channels.slots import replay
from excite.wiring.operators.movement import REPEATS, SAME, VIEWS
from excite.wiring.operators.pooling import AVERAGE
from excite.wiring.propagation.operator_norms import copies, positive_norm, windows_per_element
from excite.wiring.propagation.sensitivity import Reach, Walk, first_shape, rule, unknown, whole


def only(a: SimpleNamespace, node: torch.fx.Node) -> Reach:
    """The first argument, which has to be the only one that depends on the model's input."""
    if not isinstance(a.args[0], Reach) or any(isinstance(other, Reach) for other in a.args[1:]):
        raise unknown(node, f"{a.op} of two activations")
    return a.args[0]


@rule(*VIEWS, *SAME, "detach")
def move(walk: Walk, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    x = only(a, node)
    shapes = shapes_of(node)
    if a.op in SAME or a.op == "detach":
        if not node.meta["val"].is_floating_point():
            raise unknown(node, "rounding to integers")
        return x
    spread = None if x.spread is None else replay(((a.target, a.args[1:], tuple(a.kwargs.items())),), x.spread)
    if isinstance(shapes, list):
        return tuple(Reach(x.factor, s) if spread is None else whole(spread[i]) for i, s in enumerate(shapes))
    return Reach(x.factor, shapes) if spread is None else whole(spread)


@rule(*REPEATS, "index", "pad", "constant_pad_nd")
def repeat(walk: Walk, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    x = only(a, node)

    def function(t: Tensor) -> Tensor:
        if a.op in ("pad", "constant_pad_nd"):  # the constant itself does not move
            return F.pad(t, list(a.pad), mode=getattr(a, "mode", "constant"))
        if a.op == "index":
            return torch.ops.aten.index.Tensor(t, a.indices)  # type: ignore[no-any-return]
        return a.target(t, *a.args[1:], **a.kwargs)  # type: ignore[no-any-return]

    return walk.step(node, x, a.op, lambda: math.sqrt(copies(function, x.shape)), function)


@rule("add", "sub", "rsub")
def add(walk: Walk, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    alpha = abs(float(a.alpha if a.alpha is not None else 1))
    weights = (alpha, 1.0) if a.op == "rsub" else (1.0, alpha)
    shape = first_shape(node)
    moving = [(value, weight) for value, weight in zip((a.self, a.other), weights) if isinstance(value, Reach)]

    def factor(value: Reach, weight: float) -> float:
        return weight * math.sqrt(math.prod(shape) / max(math.prod(value.shape), 1))

    if len(moving) == 1:
        value, weight = moving[0]
        return walk.step(node, value, a.op, lambda: factor(value, weight), lambda t: (weight * t).expand(shape))
    return walk.meet(
        node,
        "sum",
        lambda: sum(value.factor * factor(value, weight) for value, weight in moving),
        lambda: sum((weight * _spread(value) for value, weight in moving), torch.zeros((), dtype=torch.float64)),
    )


def _spread(value: Any) -> Tensor:
    """How far each element can move: not at all, if it does not depend on the model's input."""
    if isinstance(value, Reach) and value.spread is not None:
        return value.spread
    shape = tuple(value.shape) if isinstance(value, Reach | Tensor) else ()
    return torch.zeros(shape, dtype=torch.float64)


def _root_of_squares(parts: Any) -> float:
    return math.sqrt(sum(part.factor**2 for part in parts if isinstance(part, Reach)))


@rule("cat", "concat", "concatenate", "stack")
def cat(walk: Walk, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    join = torch.stack if a.op == "stack" else torch.cat
    return walk.meet(
        node,
        "concatenation",
        lambda: _root_of_squares(a.tensors),
        lambda: join([_spread(part) for part in a.tensors], a.dim or 0),
    )


@rule("maximum", "minimum")
def extreme(walk: Walk, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    """|max(a, b) − max(a', b')| ≤ max(|a − a'|, |b − b'|), whose square is at most the sum of both squares."""
    sides = (a.self, a.other)
    if any(isinstance(side, Reach) and side.shape != first_shape(node) for side in sides):
        raise unknown(node, f"{a.op} with broadcasting")
    return walk.meet(
        node, a.op, lambda: _root_of_squares(sides), lambda: torch.maximum(_spread(a.self), _spread(a.other))
    )


@rule(*AVERAGE, "mean", "sum", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
      "upsample_bilinear2d", "upsample_trilinear3d")  # fmt: skip
def average(walk: Walk, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    """Linear maps without negative weights."""
    x = only(a, node)
    kwargs = {key: value for key, value in a.kwargs.items() if key != "dtype"}

    def function(t: Tensor) -> Tensor:
        return a.target(t, *a.args[1:], **kwargs)  # type: ignore[no-any-return]

    return walk.step(node, x, a.op, lambda: positive_norm(function, x.shape), function)


@rule("amax", "amin", "max", "min")
def largest(walk: Walk, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    """As max pooling with windows that do not overlap."""
    if getattr(a, "other", None) is not None:
        return extreme(walk, node, SimpleNamespace(**{**vars(a), "op": "maximum"}))
    dims = getattr(a, "dim", None)
    dims = [] if dims is None else [dims] if isinstance(dims, int) else list(dims)
    result = walk.step(
        node, only(a, node), a.op, lambda: 1.0, lambda t: t.amax(dims, keepdim=bool(getattr(a, "keepdim", False)))
    )
    return (result, None) if isinstance(shapes_of(node), list) else result


def per_axis(value: Any, axes: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * axes if len(values) == 1 else values


@rule("max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices",
      "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")  # fmt: skip
def max_pool(walk: Walk, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    """|max over w of x − max over w of y| ≤ max over w of |x − y|, so the deviations are pooled like the numbers. In the
    2-norm Σ_w max_w |x − y|² ≤ Σ_j (windows with j) |x_j − y_j|²: the root of the number of windows an element is in."""
    x = only(a, node)
    axes = next(n for n in (1, 2, 3) if f"{n}d" in a.op)
    sizes, outs = x.shape[-axes:], first_shape(node)[-axes:]

    def factor() -> float:
        return math.sqrt(math.prod(_overlap(a, axes, i, sizes[i], outs[i]) for i in range(axes)))

    def pooled(t: Tensor) -> Tensor:
        result = a.target(t, *a.args[1:], **a.kwargs)
        return result[0] if isinstance(result, tuple) else result  # type: ignore[no-any-return]

    result = walk.step(node, x, a.op, factor, pooled)
    return (result, None) if isinstance(shapes_of(node), list) else result


def _overlap(a: SimpleNamespace, axes: int, axis: int, size: int, out: int) -> int:
    """The number of windows an element is in, along one axis."""
    if a.op.startswith("adaptive"):
        return windows_per_element(size, out, lambda i: range(i * size // out, -(-(i + 1) * size // out)))
    kernel, dilation, padding = (per_axis(v, axes)[axis] for v in (a.kernel_size, a.dilation, a.padding))
    stride = per_axis(a.stride or a.kernel_size, axes)[axis]
    return windows_per_element(size, out, lambda i: [i * stride - padding + dilation * t for t in range(kernel)])
