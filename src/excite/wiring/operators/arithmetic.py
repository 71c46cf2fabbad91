"""Sums, products, quotients and maxima of tensors, entry by entry."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from excite._core.checks import is_number
from excite.wiring.channels.labels import ZERO, Break
from excite.wiring.channels.signals import ChannelContext, ChannelSignal
from excite.wiring.channels.slots import ParameterView, scale_slot
from excite.wiring.operators.row import LINEAR, SMOOTH, Pieces, add_row, piecewise, product_of
from excite.wiring.propagation.counts import PathContext, ScaledCounts, total
from excite.wiring.propagation.schema import first_shape, module_of, shapes_of
from excite.wiring.propagation.sensitivity import LipschitzContext, Sensitivity, no_bound

_ADDED = "{} is added"
_PRODUCT = Break("the product of two activations", function=True)


# -- sums ---------------------------------------------------------------------------------------------------------------
def _add_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    x, y = a.self, a.other
    alpha = float(a.alpha if a.alpha is not None else 1) * (-1 if a.op != "add" else 1)
    for item, other in ((x, y), (y, x)):
        if is_number(item):
            signal = ctx.signal(other)
            if item != 0:
                ctx.classes.pin(signal.labels, Break("a constant is added"))
            return signal
    first, second = ctx.signal(x), ctx.signal(y)
    labels = ctx.classes.unite(first.labels, second.labels, _ADDED)
    if isinstance(y, ParameterView):
        second = ChannelSignal(second.labels, _entry_prints(ctx, second.labels))
    elif isinstance(x, ParameterView):
        first = ChannelSignal(first.labels, _entry_prints(ctx, first.labels))
    return ChannelSignal(labels, _plus(ctx, first, second, alpha))


def _plus(ctx: ChannelContext, x: ChannelSignal, y: ChannelSignal, alpha: float) -> Tensor | None:
    if x.prints is None and y.prints is None:
        return None
    return ctx.prints_of(x) + alpha * ctx.prints_of(y)


def _entry_prints(ctx: ChannelContext, labels: Tensor) -> Tensor:
    """The fingerprint of a parameter that is added: the k-th entry of every channel gets the k-th random number."""
    occurrences: dict[int, int] = {}
    ranks = []
    for label in labels.reshape(-1).tolist():
        root = ctx.classes.find(label)
        ranks.append(occurrences.setdefault(root, 0))
        occurrences[root] += 1
    table = ctx.random(max(ranks, default=0) + 1)
    return table[torch.tensor(ranks, dtype=torch.long)].view(labels.shape)


def _add_lipschitz(ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    alpha = abs(float(a.alpha if a.alpha is not None else 1))
    weights = (alpha, 1.0) if a.op == "rsub" else (1.0, alpha)
    shape = first_shape(node)
    moving = [(value, weight) for value, weight in zip((a.self, a.other), weights) if isinstance(value, Sensitivity)]

    def factor(value: Sensitivity, weight: float) -> float:
        return weight * math.sqrt(math.prod(shape) / max(math.prod(value.shape), 1))

    if len(moving) == 1:
        value, weight = moving[0]
        return ctx.apply(node, value, a.op, lambda: factor(value, weight), lambda t: (weight * t).expand(shape))
    return ctx.combine(
        node,
        "sum",
        lambda: sum(value.factor * factor(value, weight) for value, weight in moving),
        lambda: sum((weight * deviation_of(value) for value, weight in moving), torch.zeros((), dtype=torch.float64)),
    )


def deviation_of(value: Any) -> Tensor:
    """How far each element can move: not at all, if it does not depend on the model's input."""
    if isinstance(value, Sensitivity) and value.deviation is not None:
        return value.deviation
    shape = tuple(value.shape) if isinstance(value, Sensitivity | Tensor) else ()
    return torch.zeros(shape, dtype=torch.float64)


def root_of_squares(operands: Any) -> float:
    """The constant of several branches side by side, in the 2-norm."""
    return math.sqrt(sum(operand.factor**2 for operand in operands if isinstance(operand, Sensitivity)))


def _add_paths(ctx: PathContext, node: torch.fx.Node, a: SimpleNamespace) -> ScaledCounts:
    counts = [operand for operand in (a.self, a.other) if isinstance(operand, ScaledCounts)]
    constants = [operand for operand in (a.self, a.other) if isinstance(operand, Tensor)] if ctx.biases else []
    return total([*counts, *(ScaledCounts(torch.ones_like(operand, dtype=torch.float64)) for operand in constants)])


# -- products and quotients ---------------------------------------------------------------------------------------------
def _multiply_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    x, y = a.self, a.other
    by = a.op in ("div", "divide", "true_divide")
    if getattr(a, "rounding_mode", None) is not None:
        return ctx.unknown(node, [v for v in (x, y) if not isinstance(v, int | float)], "rounding")
    if isinstance(x, int | float):
        x, y = (x, y) if by else (y, x)
    if isinstance(y, int | float):
        value = ctx.signal(x)
        return ChannelSignal(
            value.labels, None if value.prints is None else value.prints * (1 / y if by and y else float(y))
        )
    if isinstance(y, ParameterView) and not isinstance(x, ParameterView) and not by:
        return scaled(ctx, node, ctx.signal(x), y)
    if isinstance(x, ParameterView) and not isinstance(y, ParameterView) and not by:
        return scaled(ctx, node, ctx.signal(y), x)
    first, second = ctx.signal(x), ctx.signal(y)
    if by and not ctx.classes.all_fixed(second.labels):
        return ctx.unknown(node, [first, second], "division by an activation")
    return gated(ctx, first, second)


def gated(ctx: ChannelContext, x: ChannelSignal, y: ChannelSignal) -> ChannelSignal:
    """A product of two activations.

    It is linear in one if the other does not scale; otherwise it scales by the product of their factors.
    """
    classes = ctx.classes
    a, b = torch.broadcast_tensors(x.labels, y.labels)
    x_fixed, y_fixed = classes.all_fixed(x.labels), classes.all_fixed(y.labels)
    if x_fixed and y_fixed:
        return ChannelSignal(_connected(ctx, a, b))
    if not (x_fixed or y_fixed):
        return ChannelSignal(_product(ctx, [x.labels, y.labels], "a product"))
    prints = None
    if (x if y_fixed else y).prints is not None:
        prints = ctx.prints_of(x) * ctx.prints_of(y)
    return ChannelSignal(a if y_fixed else b, prints)


def _product(ctx: ChannelContext, factors: list[Tensor], name: str) -> Tensor:
    labels = ctx.relations.product(factors, _PRODUCT)
    for tensor in (*factors, labels):
        ctx.classes.pass_through(tensor, name, linear=False)
    return labels


def _connected(ctx: ChannelContext, a: Tensor, b: Tensor) -> Tensor:
    # All of it is pinned; labels are joined only so that the table can say who feeds whom.
    joined = (a > 0) & (b > 0)
    if bool(joined.any()):
        ctx.classes.unite(torch.where(joined, a, ZERO), torch.where(joined, b, ZERO), "")
    return torch.where((a < 0) & (b > 0), b, a)


def scaled(ctx: ChannelContext, node: torch.fx.Node, x: ChannelSignal, view: ParameterView) -> ChannelSignal:
    """An activation times a parameter.

    If each entry meets one channel, it reads that channel and makes a new one (a diagonal map); if an entry is shared by several
    channels (a learned scalar), it is a number like any other: the channels pass.
    """
    classes = ctx.classes
    shape = shapes_of(node)
    entries = view.entries()
    own = entries.reshape(-1)
    lead = (1,) * (len(shape) - entries.dim()) + tuple(entries.shape)
    axes = [i for i, size in enumerate(lead) if size == 1 and shape[i] > 1]
    expanded = x.labels.expand(shape)
    # The labels that each entry meets, in the order of the entries; more than one class per entry is a shared number.
    meets = expanded.permute(*[i for i in range(len(shape)) if i not in axes], *axes).reshape(own.numel(), -1)
    roots = [{classes.find(label) for label in classes.distinct(row)} for row in _rows(meets)]
    if any(len({r for r in row if not classes.fixed(r)}) > 1 or _mixed(ctx, row) for row in roots):
        classes.exclude(ctx.signal(view).labels, Break("it multiplies several channels at once"))
        prints = None if x.prints is None else x.prints * view.view(ctx.random(*view.shape))
        return ChannelSignal(expanded, prints)
    slot = scale_slot(view, own.numel())
    inp = classes.reduce(meets, [1], "{} is scaled").reshape(-1)
    layer = view.path.removesuffix(".weight")
    out = ctx.produce(layer, slot, inp, None)
    for labels in (inp, out):
        classes.not_mixable(labels)
    return ChannelSignal(out.view(lead).expand(shape))


def _rows(meets: Tensor) -> list[Tensor]:
    if meets.shape[1] > 1 and bool((meets == meets[:, :1]).all()):
        meets = meets[:, :1]
    return list(meets)


def _mixed(ctx: ChannelContext, roots: set[int]) -> bool:
    return len({ctx.classes.fixed(root) for root in roots}) > 1


def _power_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    """xⁿ for a whole number n ≥ 1 scales by the n-th power."""
    exponent = 2 if a.op == "square" else getattr(a, "exponent", None)
    is_integer = is_number(exponent) and float(exponent).is_integer()
    if not is_integer or not 1 <= float(exponent) <= 16 or not isinstance(a.self, ChannelSignal):  # type: ignore[arg-type]
        return ctx.unknown(node, [v for v in a.args if isinstance(v, ChannelSignal | ParameterView)], a.op)
    count = int(float(exponent))  # type: ignore[arg-type]
    if count == 1 or ctx.classes.all_fixed(a.self.labels):
        return ChannelSignal(a.self.labels, a.self.prints if count == 1 else None)
    return ChannelSignal(_product(ctx, [a.self.labels] * count, a.op))


def _multiply_lipschitz(ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    by = a.op not in ("mul", "multiply")
    x, y = a.self, a.other
    if not by and not isinstance(x, Sensitivity):
        x, y = y, x
    if not isinstance(x, Sensitivity) or isinstance(y, Sensitivity):
        raise no_bound(node, "division by an activation" if by else "the product of two activations")
    if getattr(a, "rounding_mode", None) is not None:
        raise no_bound(node, "division with rounding")
    number = y.double() if isinstance(y, Tensor) else torch.tensor(float(y), dtype=torch.float64)
    number = (1 / number if by else number).abs()
    repeats = math.prod(first_shape(node)) / max(math.prod(x.shape), 1)  # x may be broadcast against the constant
    return ctx.apply(
        node, x, layer_label(node, a), lambda: float(number.max()) * math.sqrt(repeats), lambda t: t * number
    )


def layer_label(node: torch.fx.Node, a: SimpleNamespace) -> str:
    """The module of a call, or the operator's name, as the name of a term."""
    return module_of(node) or str(a.op)


def _multiply_paths(ctx: PathContext, node: torch.fx.Node, a: SimpleNamespace) -> ScaledCounts | None:
    """A product with a parameter or a constant is an edge of its own; one of two signals is no feedforward network."""
    if isinstance(a.self, ScaledCounts) == isinstance(a.other, ScaledCounts):
        return None
    x, factor = (a.self, a.other) if isinstance(a.self, ScaledCounts) else (a.other, a.self)
    if isinstance(a.other, ScaledCounts) and a.op.startswith(("div", "true")):
        return None
    if not isinstance(factor, Tensor):
        return x
    return ScaledCounts(x.values * torch.ones_like(factor, dtype=torch.float64), x.power)


# -- maxima and selections ----------------------------------------------------------------------------------------------
def _extreme_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    x, y = ctx.signal(a.self), ctx.signal(a.other)
    labels = ctx.classes.unite(x.labels, y.labels, "{} is compared with it by " + a.op)
    ctx.pass_through(labels, a)
    return ChannelSignal(labels)


def extreme_lipschitz(ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    """|max(a, b) − max(a', b')| ≤ max(|a − a'|, |b − b'|), whose square is at most the sum of both squares."""
    sides = (a.self, a.other)
    if any(isinstance(side, Sensitivity) and side.shape != first_shape(node) for side in sides):
        raise no_bound(node, f"{a.op} with broadcasting")
    return ctx.combine(
        node, a.op, lambda: root_of_squares(sides), lambda: torch.maximum(deviation_of(a.self), deviation_of(a.other))
    )


def _where_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    condition = ctx.signal(a.condition)
    if not ctx.classes.all_fixed(condition.labels):
        return ctx.unknown(node, [condition, ctx.signal(a.self), ctx.signal(a.other)], a.op)
    shape = shapes_of(node)
    sides = []
    for side in (a.self, a.other):
        zero = (isinstance(side, int | float) and side == 0) or (isinstance(side, Tensor) and not bool(side.any()))
        sides.append(torch.tensor(ZERO) if zero else ctx.signal(side).labels)
    labels = ctx.classes.unite(sides[0].expand(shape), sides[1], "{} takes its place in where")
    ctx.pass_through(labels, a)
    return ChannelSignal(labels)


def _masked_fill_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value, mask = ctx.signal(a.self), ctx.signal(a.mask)
    zero = isinstance(a.value, int | float) and a.value == 0
    if not zero or not ctx.classes.all_fixed(mask.labels):
        return ctx.unknown(node, [value, mask, ctx.signal(a.value)], a.op)
    ctx.pass_through(value.labels, a)
    return ChannelSignal(value.labels)


# fmt: off
# -- rows ---------------------------------------------------------------------------------------------------------------
add_row("add sub rsub", channels=_add_channels, conservation="matrix", lipschitz=_add_lipschitz, pieces=LINEAR,
        paths=_add_paths)
add_row("mul", channels=_multiply_channels, conservation="matrix", lipschitz=_multiply_lipschitz,
        pieces=product_of("self", "other"), paths=_multiply_paths)
add_row("multiply divide true_divide", channels=_multiply_channels, conservation="matrix", lipschitz=_multiply_lipschitz,
        paths=_multiply_paths)
add_row("div", channels=_multiply_channels, conservation="matrix", lipschitz=_multiply_lipschitz, paths=_multiply_paths,
        pieces=piecewise(lambda a, r: (r,) if getattr(a, "rounding_mode", None) else (), fixed=("other",)))
add_row("square pow", channels=_power_channels, conservation="channel", pieces=SMOOTH)
add_row("maximum minimum", channels=_extreme_channels, conservation="channel", lipschitz=extreme_lipschitz,
        pieces=piecewise(lambda a, r: (a.self > a.other,)))
add_row("fmax fmin", pieces=piecewise(lambda a, r: (a.self > a.other,)))
add_row("where", channels=_where_channels, conservation="channel", pieces=LINEAR)
add_row("masked_fill", channels=_masked_fill_channels, conservation="channel", pieces=LINEAR)
add_row("addcmul", pieces=product_of("tensor1", "tensor2"))
add_row("addcdiv", pieces=product_of("self/tensor1", fixed=("tensor2",)))
add_row("lerp", pieces=product_of("self/end", "weight"))
add_row("remainder", conservation="none",
        pieces=piecewise(lambda a, r: (torch.floor_divide(a.self, a.other),), fixed=("other",)))
add_row("fmod", conservation="none",
        pieces=piecewise(lambda a, r: (torch.div(a.self, a.other, rounding_mode="trunc"),), fixed=("other",)))
add_row("floor_divide", conservation="none", pieces=Pieces("discrete", fixed=("other",)))
add_row("copysign", pieces=piecewise(lambda a, r: (a.self > 0, torch.as_tensor(a.other).expand_as(r) > 0)))
add_row("atan2 hypot", pieces=SMOOTH)
add_row("xlogy logaddexp logaddexp2", conservation="none", pieces=SMOOTH)
add_row("mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss",
        conservation="none", pieces=SMOOTH)
