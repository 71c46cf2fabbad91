"""Where the numbers in a model's graph come from: which output channel of which affine call, and where attention is.

Channel labels of `excite.wiring.channels` number every output channel of every affine call. Here they are carried on through
everything that leaves numbers in their place (activations, normalizations, rotary embeddings, masks), without asking
whether a law survives it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from excite.wiring.channels.signals import ChannelContext
from excite.wiring.channels.slots import ParameterView, Use, replay
from excite.wiring.export import Exported
from excite.wiring.operators.linear import matmul_letters
from excite.wiring.operators.movement import REPEATS, SAME, VIEWS
from excite.wiring.operators.row import OperatorRow
from excite.wiring.propagation.interpreter import Interpreter, leaves
from excite.wiring.propagation.schema import module_of, name_of, shapes_of

_MOVES = frozenset((*VIEWS, *REPEATS))
_PRODUCTS = {"matmul": (0, 1), "bmm": (0, 1), "mm": (0, 1), "baddbmm": (1, 2), "addmm": (1, 2)}
_KERNELS = ("attn", "attention")


@dataclass(frozen=True)
class Origin:
    """An activation: the number of the channel every element comes from (0: not known), and what it went through since."""

    labels: Tensor
    norms: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    partner: Origin | None = None  # the other factor, in a product of two activations

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the activation."""
        return tuple(self.labels.shape)


@dataclass(frozen=True)
class _Scores:
    """Logits of attention, or their softmax: origins of queries and keys (lead, D)."""

    query: Origin
    key: Origin
    softmax: bool = False


@dataclass
class TracedAttention:
    """An attention with what is known of the origin of its parts: labels (leading positions, channels)."""

    node: torch.fx.Node
    kernel: str
    query: Origin
    key: Origin
    value: Origin
    start: int  # labels of its output: start + head · width + channel
    heads: int
    width: int  # channels per head of the values
    groups: list[int]  # by head: its key head


@dataclass
class Provenance:
    """All affine calls in order with the origin of what they read, and the attentions in order.

    `calls` holds the use, the origin of its input as (channels,), and the node.
    """

    ctx: ChannelContext
    calls: list[tuple[Use, Origin | None, torch.fx.Node]] = field(default_factory=list)
    attentions: list[TracedAttention] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)  # by module: a kernel of attention that is not understood
    outputs: list[Origin] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)
    _owners: list[Use | TracedAttention] = field(default_factory=list)
    end: int = 0
    _imaginary: dict[int, int] = field(default_factory=dict)  # by the label of a real part

    def as_complex(self, value: Origin) -> Origin:
        """Pairs (..., 2) as complex numbers, with the labels of their real parts."""
        real, imaginary = value.labels.unbind(-1)
        self._imaginary.update(zip(real.flatten().tolist(), imaginary.flatten().tolist()))
        return replace(value, labels=real)

    def as_real(self, value: Origin) -> Origin:
        """The pairs of complex numbers."""
        imaginary = [self._imaginary.get(label, 0) for label in value.labels.flatten().tolist()]
        return replace(value, labels=torch.stack([value.labels, torch.tensor(imaginary).view(value.shape)], -1))

    def own(self, start: int, source: Use | TracedAttention) -> None:
        """Registers the owner of the labels from `start` on; starts come in any order."""
        at = bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._owners.insert(at, source)

    def origin_of(self, label: int) -> tuple[Use | TracedAttention, int] | None:
        """The affine call or attention that makes a channel, and the channel's number in it."""
        at = bisect_right(self._starts, label) - 1
        if label <= 0 or at < 0:
            return None
        return self._owners[at], label - self._starts[at]


class ProvenanceInterpreter(Interpreter):
    """Carries the origins of numbers through a graph, and notes every affine call and every attention on the way."""

    followed = (Origin, ParameterView, _Scores)
    context: Provenance

    def parameter(self, node: torch.fx.Node, path: str) -> ParameterView:
        """Returns a parameter by name and shape."""
        return ParameterView(path, self.context.ctx.shapes[path])

    def constant(self, value: Tensor) -> Tensor:
        """Returns a constant as it is."""
        return value

    def input(self, node: torch.fx.Node) -> Any:
        """Returns an activation of unknown origin."""
        shape = shapes_of(node)
        return _nothing(shape) if isinstance(shape, tuple) else node.meta.get("val")

    def compute(self, node: torch.fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Numbers that depend on no parameter and no input come from nowhere; copies of constants are constants."""
        if args and isinstance(args[0], Tensor) and name_of(node.target) in SAME:
            return args[0]
        return _filled(shapes_of(node))

    def overwritten(self, node: torch.fx.Node, values: list[Any]) -> None:
        """Writing in place leaves origins as they are."""

    def rule(self, node: torch.fx.Node, row: OperatorRow | None) -> Callable[..., Any] | None:
        """One rule for all operators of ATen."""
        return self._follow if hasattr(node.target, "_schema") else None

    def missing(self, node: torch.fx.Node, values: list[Any]) -> Any:
        """The result of a graph inside the graph is of unknown origin."""
        name = name_of(node.target)
        if any(kernel in name for kernel in _KERNELS):
            self.context.unknown.setdefault(module_of(node) or name, name)
        return _filled(shapes_of(node))

    def _follow(self, provenance: Provenance, node: torch.fx.Node, a: SimpleNamespace) -> Any:
        try:
            return self._traced(provenance, node, a)
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError):
            return _filled(shapes_of(node))  # an overload that is not understood: of unknown origin

    def _traced(self, provenance: Provenance, node: torch.fx.Node, a: SimpleNamespace) -> Any:
        made = provenance.ctx.made.get(node)
        if made is not None and (made[0].inp is not None or a.op == "embedding") and not _scales(made[0]):
            return self._affine(provenance, node, a, *made)
        if a.op in _MOVES:
            return self._moved(node, a)
        if a.op in SAME:
            return a.args[0]
        if a.op in ("view_as_complex", "view_as_real"):
            return provenance.as_complex(a.args[0]) if a.op == "view_as_complex" else provenance.as_real(a.args[0])
        if (
            a.op == "index"
            and isinstance(a.self, Origin)
            and all(i is None or isinstance(i, Tensor) for i in a.indices)
        ):
            return replace(a.self, labels=torch.ops.aten.index.Tensor(a.self.labels, a.indices))
        if a.op in ("cat", "stack", "concat", "concatenate"):
            scores = next((operand for operand in a.tensors if isinstance(operand, _Scores)), None)
            if scores is not None:  # with an attention sink
                return scores
            origins = [operand if isinstance(operand, Origin) else _nothing(_shape(operand)) for operand in a.tensors]
            join = torch.stack if a.op == "stack" else torch.cat
            first = max(origins, key=lambda operand: bool(operand.labels.any()))
            return replace(first, labels=join([operand.labels for operand in origins], a.dim or 0))
        if a.op == "scaled_dot_product_attention":
            shape = shapes_of(node)
            labels = self._attention(provenance, node, a.op, (_last(a.query), _last(a.key), _last(a.value)))
            return Origin(labels.view(*shape[:-2], 1, shape[-1]).expand(shape))
        if any(kernel in a.op for kernel in _KERNELS):
            provenance.unknown.setdefault(module_of(node) or a.op, a.op)
        if a.op in _PRODUCTS or a.op == "einsum":
            return self._product(provenance, node, a)
        return self._entrywise(node, a)

    def _affine(
        self, provenance: Provenance, node: torch.fx.Node, a: SimpleNamespace, use: Use, labels: Tensor
    ) -> Origin:
        """A product with a weight: its output channels are new ones."""
        read = None
        signals = [value for value in leaves(a.args) if isinstance(value, Origin)]
        if use.inp is not None and signals:
            axis = 1 if a.op.startswith("conv") or "convolution" in a.op else -1
            signals = [_read_last(value, a) for value in signals] if a.op == "einsum" else signals
            x = max(signals, key=lambda factor: factor.labels.dim() and factor.shape[axis] == use.slot.inputs)
            if x.shape[axis] == use.slot.inputs:
                rows = x.labels.movedim(axis, -1).reshape(-1, use.slot.inputs)
                same = bool((rows == rows[:1]).all())
                read = replace(x, labels=rows[0] if same else torch.zeros_like(rows[0]))
        provenance.calls.append((use, read, node))
        return Origin(labels)

    def _moved(self, node: torch.fx.Node, a: SimpleNamespace) -> Any:
        value = a.args[0]
        if isinstance(value, ParameterView):
            shapes = shapes_of(node)
            view = value.then(a.target, *a.args[1:], **a.kwargs)
            return tuple(view.item(i) for i in range(len(shapes))) if isinstance(shapes, list) else view
        if not isinstance(value, Origin):
            return value
        moved = replay(((a.target, a.args[1:], tuple(a.kwargs.items())),), value.labels)
        if isinstance(moved, tuple | list):
            return tuple(replace(value, labels=labels) for labels in moved)
        return replace(value, labels=moved)

    def _product(self, provenance: Provenance, node: torch.fx.Node, a: SimpleNamespace) -> Any:
        """A product of two activations: queries with keys, or attention weights with values."""
        shape = shapes_of(node)
        if a.op == "einsum":
            (x, y), equation = a.tensors, a.equation.replace(" ", "").replace("->", ",").split(",")
        else:
            x, y = (a.args[i] for i in _PRODUCTS[a.op])
            equation = list(matmul_letters(*(shapes_of(node.args[i]) for i in _PRODUCTS[a.op])))  # type: ignore[arg-type]
        if isinstance(x, Origin) and isinstance(y, Origin):
            operands = _scored(x, y, equation)
            return _Scores(*operands) if operands is not None else _nothing(shape)
        if isinstance(x, _Scores) and x.softmax and isinstance(y, Origin):
            layout = _attended(equation)
            if layout is not None:
                lead, contracted, position, channel = layout
                value = _by_lead(y, equation[1], lead, contracted, channel)
                labels = self._attention(provenance, node, "softmax", (x.query, x.key, value))
                labels = labels.view(*(shape[equation[2].index(k)] for k in lead), 1, -1)
                labels = labels.permute([(*lead, position, channel).index(k) for k in equation[2]])
                return Origin(labels.expand(shape))
        return _nothing(shape)

    def _attention(
        self, provenance: Provenance, node: torch.fx.Node, kernel: str, origins: tuple[Origin, Origin, Origin]
    ) -> Tensor:
        """Notes an attention of queries, keys and values (lead, D); returns new labels (lead, D) for what it makes."""
        query, key, value = origins
        heads, count = _numbered(query.labels)
        keys = _numbered(key.labels)[0]
        per = max(1, len(heads) // max(1, len(keys)))  # enable_gqa: consecutive query heads share a key head
        groups = [keys[min(heads.index(h) // per, len(keys) - 1)] for h in range(count)]
        width = value.labels.shape[-1]
        attention = TracedAttention(node, kernel, query, key, value, provenance.end + 1, count, width, groups)
        provenance.own(attention.start, attention)
        provenance.end += count * width
        provenance.attentions.append(attention)
        return torch.tensor(heads)[:, None] * width + torch.arange(width) + attention.start

    def _entrywise(self, node: torch.fx.Node, a: SimpleNamespace) -> Any:
        """Anything else: numbers stay in their place, if the result has the shape of an argument."""
        shape = shapes_of(node)
        if isinstance(shape, list):
            return _filled(shape)
        values = leaves((a.args, a.kwargs))
        scores = [value for value in values if isinstance(value, _Scores)]
        if scores:
            return replace(scores[0], softmax=scores[0].softmax or "softmax" in a.op)
        same = [v for v in values if isinstance(v, Origin) and v.shape == shape]
        known = [v for v in same if bool(v.labels.any())] or same
        if not known:
            return _nothing(shape)
        first = max(known, key=lambda first: len(first.functions)) if not _strangers(*known[:2]) else known[0]
        if a.row is not None and a.row.conservation == "norm":
            return replace(first, norms=(*first.norms, module_of(node) or a.op))
        if a.op in ("mul", "multiply") and len(known) == 2 and _strangers(*known):
            active = max(known, key=lambda first: bool(first.functions))
            other = known[1] if active is known[0] else known[0]
            return replace(other, partner=active)
        scale = next((v for v in values if isinstance(v, ParameterView)), None)
        if a.op in ("mul", "multiply") and scale is not None:
            return replace(first, norms=(*first.norms, module_of(node) or scale.path))
        if a.row is not None and a.row.activation is not None:
            return replace(first, functions=(*first.functions, a.op))
        return first


def follow_origins(exported: Exported, ctx: ChannelContext) -> Provenance:
    """Returns the affine calls and attentions of a graph whose channels were followed, with where their inputs come from."""
    results = Provenance(ctx, end=ctx.classes.last)
    for use in ctx.uses:
        if use.out is not None and use.out.numel():
            results.own(int(use.out[0]), use)
    result = ProvenanceInterpreter(results).run(exported)
    results.outputs = [leaf for leaf in leaves(result) if isinstance(leaf, Origin)]
    return results


def _scales(use: Use) -> bool:
    """A parameter that multiplies entry by entry: no map from one set of channels to another."""
    return use.slot.shape[1:] == (1, 1, 1)


def _nothing(shape: tuple[int, ...]) -> Origin:
    return Origin(torch.zeros((), dtype=torch.long).expand(shape))


def _filled(shapes: Any) -> Any:
    if isinstance(shapes, list):
        return tuple(_filled(shape) for shape in shapes)
    return None if shapes is None else _nothing(shapes)


def _read_last(value: Origin, a: SimpleNamespace) -> Origin:
    """The activation in an einsum with a weight, with the axes that are summed over joined at the end, in the weight's order."""
    operands, _, made = a.equation.replace(" ", "").partition("->")
    x, y = operands.split(",")
    if isinstance(a.tensors[0], ParameterView):
        x, y = y, x
    read = [k for k in y if k in x and k not in made]
    if len(read) < 2:
        return value
    labels = value.labels.permute([x.index(k) for k in (*(k for k in x if k not in read), *read)])
    return replace(value, labels=labels.flatten(-len(read)))


def _shape(value: Any) -> tuple[int, ...]:
    if isinstance(value, ParameterView):
        return tuple(value.view(torch.empty(value.shape, device="meta")).shape)
    return tuple(value.shape) if hasattr(value, "shape") else ()


def _strangers(origin: Origin, other: Origin | None = None) -> bool:
    """Whether two activations come from different channels."""
    return other is not None and not bool((origin.labels == other.labels).any())


def _rows(labels: Tensor) -> Tensor:
    """(lead, positions, D) to (lead, D): the channels at every position, 0 where positions differ."""
    first = labels[:, 0]
    same = (labels == first[:, None]).all(1)
    return torch.where(same, first, torch.zeros_like(first))


def _last(value: Origin) -> Origin:
    """The origin of queries, keys or values (…, positions, D) as (lead, D)."""
    labels = value.labels
    return replace(value, labels=_rows(labels.reshape(-1, *labels.shape[-2:])))


def _scored(x: Origin, y: Origin, equation: Sequence[str]) -> tuple[Origin, Origin] | None:
    """Queries and keys (lead, D) of a product; None if it does not have the form of one."""
    a, b, c = equation
    contracted = [k for k in a if k in b and k not in c]
    rows, columns = [k for k in a if k not in b], [k for k in b if k not in a]
    lead = [k for k in c if k in a and k in b]
    if len(contracted) != 1 or len(rows) != 1 or len(columns) != 1 or {*lead, *rows, *columns} != set(c):
        return None
    return _by_lead(x, a, lead, rows[0], contracted[0]), _by_lead(y, b, lead, columns[0], contracted[0])


def _by_lead(value: Origin, letters: str, lead: Sequence[str], position: str, channel: str) -> Origin:
    labels = value.labels.permute([letters.index(k) for k in (*lead, position, channel)])
    return replace(value, labels=_rows(labels.reshape(-1, *labels.shape[-2:])))


def _attended(equation: Sequence[str]) -> tuple[list[str], str, str, str] | None:
    """The letters of attention weights times values: leading axes, positions of keys, positions of queries, channels."""
    a, b, c = equation
    contracted = [k for k in a if k in b and k not in c]
    channel, position = [k for k in b if k not in a], [k for k in a if k not in b]
    if len(contracted) != 1 or len(channel) != 1 or len(position) != 1:
        return None
    return [k for k in c if k in a and k in b], contracted[0], position[0], channel[0]


def _numbered(labels: Tensor) -> tuple[list[int], int]:
    """Numbers the heads of (lead, D): by lead, the number of its head; and how many there are.

    Equal rows are the same head of two samples. Where origins are not known, half of the leading positions belong to each
    of the two samples of the graph, the second half of them to the second.
    """
    if not bool(labels.all()):
        count = max(1, len(labels) // 2)
        return [i % count for i in range(len(labels))], count
    numbers: dict[tuple[int, ...], int] = {}
    rows = [numbers.setdefault(tuple(row), len(numbers)) for row in labels.tolist()]
    return rows, len(numbers)
