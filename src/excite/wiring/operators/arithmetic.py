"""Sums, products, activations and pooling: what keeps a positive factor and what does not."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from excite._core.checks import is_number
from excite.wiring.channels.labels import ZERO, Break
from excite.wiring.channels.signals import Bench, Signal, shapes_of
from excite.wiring.channels.slots import Held, scale_slot
from excite.wiring.propagation.schema import rule

_ADDED = "{} is added"


def _plus(bench: Bench, x: Signal, y: Signal, alpha: float) -> Tensor | None:
    if x.prints is None and y.prints is None:
        return None
    return bench.prints_of(x) + alpha * bench.prints_of(y)


@rule("add", "sub", "rsub")
def add(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    x, y = a.self, a.other
    alpha = float(a.alpha if a.alpha is not None else 1) * (-1 if a.op != "add" else 1)
    for one, other in ((x, y), (y, x)):
        if is_number(one):
            signal = bench.signal(other)
            if one != 0:
                bench.classes.pin(signal.labels, Break("a constant is added"))
            return signal
    first, second = bench.signal(x), bench.signal(y)
    labels = bench.classes.unite(first.labels, second.labels, _ADDED)
    if isinstance(y, Held):
        second = Signal(second.labels, _entry_prints(bench, second.labels))
    elif isinstance(x, Held):
        first = Signal(first.labels, _entry_prints(bench, first.labels))
    return Signal(labels, _plus(bench, first, second, alpha))


def _entry_prints(bench: Bench, labels: Tensor) -> Tensor:
    """The fingerprint of a parameter that is added: the k-th entry of every channel gets the k-th random number."""
    seen: dict[int, int] = {}
    ranks = []
    for label in labels.reshape(-1).tolist():
        root = bench.classes.find(label)
        ranks.append(seen.setdefault(root, 0))
        seen[root] += 1
    table = bench.random(max(ranks, default=0) + 1)
    return table[torch.tensor(ranks, dtype=torch.long)].view(labels.shape)


@rule("mul", "multiply", "div", "divide", "true_divide")
def multiply(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    x, y = a.self, a.other
    by = a.op in ("div", "divide", "true_divide")
    if getattr(a, "rounding_mode", None) is not None:
        return bench.unknown(node, [v for v in (x, y) if not isinstance(v, int | float)], "rounding")
    if isinstance(x, int | float):
        x, y = (x, y) if by else (y, x)
    if isinstance(y, int | float):
        value = bench.signal(x)
        return Signal(value.labels, None if value.prints is None else value.prints * (1 / y if by and y else float(y)))
    if isinstance(y, Held) and not isinstance(x, Held) and not by:
        return scaled(bench, node, bench.signal(x), y)
    if isinstance(x, Held) and not isinstance(y, Held) and not by:
        return scaled(bench, node, bench.signal(y), x)
    first, second = bench.signal(x), bench.signal(y)
    if by and not bench.classes.all_fixed(second.labels):
        return bench.unknown(node, [first, second], "division by an activation")
    return gated(bench, first, second)


_PRODUCT = Break("the product of two activations", function=True)


def gated(bench: Bench, x: Signal, y: Signal) -> Signal:
    """A product of two activations: linear in one if the other does not scale; otherwise it scales by the product of their
    factors."""
    classes = bench.classes
    a, b = torch.broadcast_tensors(x.labels, y.labels)
    x_fixed, y_fixed = classes.all_fixed(x.labels), classes.all_fixed(y.labels)
    if x_fixed and y_fixed:
        return Signal(_connected(bench, a, b))
    if not (x_fixed or y_fixed):
        return Signal(_product(bench, [x.labels, y.labels], "a product"))
    prints = None
    if (x if y_fixed else y).prints is not None:
        prints = bench.prints_of(x) * bench.prints_of(y)
    return Signal(a if y_fixed else b, prints)


def _product(bench: Bench, factors: list[Tensor], name: str) -> Tensor:
    labels = bench.relations.product(factors, _PRODUCT)
    for part in (*factors, labels):
        bench.classes.pass_through(part, name, linear=False)
    return labels


def _connected(bench: Bench, a: Tensor, b: Tensor) -> Tensor:
    # All of it is pinned; labels are joined only so that the table can say who feeds whom.
    both = (a > 0) & (b > 0)
    if bool(both.any()):
        bench.classes.unite(torch.where(both, a, ZERO), torch.where(both, b, ZERO), "")
    return torch.where((a < 0) & (b > 0), b, a)


@rule("square", "pow")
def power(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    """xⁿ for a whole number n ≥ 1 scales by the n-th power."""
    exponent = 2 if a.op == "square" else getattr(a, "exponent", None)
    whole = is_number(exponent) and float(exponent).is_integer()
    if not whole or not 1 <= float(exponent) <= 16 or not isinstance(a.self, Signal):  # type: ignore[arg-type]
        return bench.unknown(node, [v for v in a.args if isinstance(v, Signal | Held)], a.op)
    count = int(float(exponent))  # type: ignore[arg-type]
    if count == 1 or bench.classes.all_fixed(a.self.labels):
        return Signal(a.self.labels, a.self.prints if count == 1 else None)
    return Signal(_product(bench, [a.self.labels] * count, a.op))


@rule("glu")
def gated_linear_unit(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    """x · sigmoid(y), for the halves of its input: linear in x."""
    value, gate = bench.signal(a.self).labels.chunk(2, a.dim)
    bench.classes.pin(gate, Break("the sigmoid of glu", function=True))
    bench.classes.pass_through(value, a.op, linear=False)
    return Signal(value)


def scaled(bench: Bench, node: torch.fx.Node, x: Signal, held: Held) -> Signal:
    """x times a parameter. If each entry meets one channel, it reads that channel and makes a new one (a diagonal map);
    if an entry is shared by several channels (a learned scalar), it is a number like any other: the channels pass."""
    classes = bench.classes
    shape = shapes_of(node)
    entries = held.entries()
    own = entries.reshape(-1)
    lead = (1,) * (len(shape) - entries.dim()) + tuple(entries.shape)
    axes = [i for i, size in enumerate(lead) if size == 1 and shape[i] > 1]
    spread = x.labels.expand(shape)
    # The labels that each entry meets, in the order of the entries; more than one class per entry is a shared number.
    meets = spread.permute(*[i for i in range(len(shape)) if i not in axes], *axes).reshape(own.numel(), -1)
    roots = [{classes.find(label) for label in classes.distinct(row)} for row in _rows(meets)]
    if any(len({r for r in row if not classes.fixed(r)}) > 1 or _mixed(bench, row) for row in roots):
        classes.set_aside(bench.signal(held).labels, Break("it multiplies several channels at once"))
        prints = None if x.prints is None else x.prints * held.view(bench.random(*held.shape))
        return Signal(spread, prints)
    slot = scale_slot(held, own.numel())
    inp = classes.reduce(meets, [1], "{} is scaled").reshape(-1)
    layer = held.path.removesuffix(".weight")
    out = bench.produce(layer, slot, inp, None)
    for labels in (inp, out):
        classes.not_mixable(labels)
    return Signal(out.view(lead).expand(shape))


def _rows(meets: Tensor) -> list[Tensor]:
    if meets.shape[1] > 1 and bool((meets == meets[:, :1]).all()):
        meets = meets[:, :1]
    return list(meets)


def _mixed(bench: Bench, roots: set[int]) -> bool:
    return len({bench.classes.fixed(root) for root in roots}) > 1


# Positively homogeneous: f(a x) = a f(x) for every a > 0.
@rule("relu", "leaky_relu", "abs", "rrelu", "rrelu_with_noise")
def homogeneous(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value = bench.signal(a.args[0])
    bench.classes.pass_through(value.labels, a.op, linear=False)
    return Signal(value.labels)


@rule("prelu", "_prelu_kernel")
def prelu(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    slope = bench.signal(a.args[1])
    bench.classes.set_aside(slope.labels, Break("a slope has no scale of its own"))
    return homogeneous(bench, node, a)


@rule("neg")
def negative(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value = bench.signal(a.args[0])
    return Signal(value.labels, None if value.prints is None else -value.prints)


@rule("dropout", "feature_dropout", "native_dropout")
def dropout(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value = bench.signal(a.input)
    if a.p > 0:  # masks differ between channels; the law is about training, whatever mode the model is in now
        bench.classes.pass_through(value.labels, "dropout", linear=False)
        value = Signal(value.labels)
    return (value, bench.constant(value.shape)) if a.op == "native_dropout" else value


@rule("clamp", "clamp_min", "clamp_max", "hardtanh")
def clamp(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    ends = (getattr(a, "min", None), getattr(a, "max", None))
    if a.op == "hardtanh" or any(not isinstance(end, int | float | None) for end in ends):
        return bench.unknown(node, [a.args[0]], a.op)
    if any(end is not None and end != 0 and not math.isinf(end) for end in ends):
        return bench.unknown(node, [a.args[0]], a.op)
    return homogeneous(bench, node, a)


@rule("maximum", "minimum")
def extreme(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    x, y = bench.signal(a.self), bench.signal(a.other)
    labels = bench.classes.unite(x.labels, y.labels, "{} is compared with it by " + a.op)
    bench.classes.pass_through(labels, a.op, linear=False)
    return Signal(labels)


@rule("gt", "ge", "lt", "le", "eq", "ne", "sign")
def compare(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    """A comparison with zero does not see positive factors."""
    if a.op == "sign" or (isinstance(a.other, int | float) and a.other == 0):
        value = bench.signal(a.self)
        bench.classes.not_mixable(value.labels)
        return bench.constant(value.shape)
    return bench.unknown(node, [v for v in (a.self, a.other) if isinstance(v, Signal | Held)], a.op)


@rule("where")
def where(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    condition = bench.signal(a.condition)
    if not bench.classes.all_fixed(condition.labels):
        return bench.unknown(node, [condition, bench.signal(a.self), bench.signal(a.other)], a.op)
    shape = shapes_of(node)
    sides = []
    for side in (a.self, a.other):
        zero = (isinstance(side, int | float) and side == 0) or (isinstance(side, Tensor) and not bool(side.any()))
        sides.append(torch.tensor(ZERO) if zero else bench.signal(side).labels)
    labels = bench.classes.unite(sides[0].expand(shape), sides[1], "{} takes its place in where")
    bench.classes.pass_through(labels, a.op, linear=False)
    return Signal(labels)


@rule("masked_fill")
def masked_fill(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value, mask = bench.signal(a.self), bench.signal(a.mask)
    zero = isinstance(a.value, int | float) and a.value == 0
    if not zero or not bench.classes.all_fixed(mask.labels):
        return bench.unknown(node, [value, mask, bench.signal(a.value)], a.op)
    bench.classes.pass_through(value.labels, a.op, linear=False)
    return Signal(value.labels)
