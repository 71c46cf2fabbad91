"""Operations that move numbers about without changing them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from excite.wiring.channels.labels import ZERO, Break
from excite.wiring.channels.signals import Bench, Signal, shapes_of
from excite.wiring.channels.slots import Held, replay
from excite.wiring.propagation.schema import rule

# Views of a parameter stay that parameter; of an activation, its labels are rearranged by the operation itself.
VIEWS = (
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "transpose", "permute", "t", "numpy_T", "mT", "squeeze",
    "unsqueeze", "select", "slice", "narrow", "movedim", "swapaxes", "swapdims", "moveaxis", "diagonal", "flip", "roll",
    "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "unsafe_chunk", "unsafe_split", "ravel",
)  # fmt: skip
# These repeat entries: a parameter that goes through them is an activation from there on.
REPEATS = ("expand", "expand_as", "repeat", "tile", "repeat_interleave", "unfold", "pixel_shuffle", "pixel_unshuffle",
           "channel_shuffle", "index_select", "take_along_dim", "broadcast_to")  # fmt: skip
SAME = ("contiguous", "clone", "alias", "_to_copy", "to", "lift_fresh_copy", "type_as", "positive", "cpu",
        "double", "float")  # fmt: skip


def rearranged(value: Signal, a: SimpleNamespace) -> Any:
    rest = a.args[1:]
    step = (a.target, rest, tuple(a.kwargs.items()))
    labels = replay((step,), value.labels)
    prints = None if value.prints is None else replay((step,), value.prints)
    if isinstance(labels, tuple | list):
        return tuple(Signal(part, None if prints is None else prints[i]) for i, part in enumerate(labels))
    return Signal(labels, prints)


@rule(*VIEWS)
def view(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value = a.args[0]
    if isinstance(value, Held):
        held = value.then(a.target, *a.args[1:], **a.kwargs)
        shapes = shapes_of(node)
        return tuple(held.part(i) for i in range(len(shapes))) if isinstance(shapes, list) else held
    return rearranged(bench.signal(value), a)


@rule(*REPEATS)
def repeat(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    if any(isinstance(other, Signal | Held) for other in a.args[1:]):
        if a.op == "expand_as":
            return bench.signal(a.args[0]).map(lambda t: t.expand(shapes_of(node)))
        return bench.unknown(node, [v for v in a.args if isinstance(v, Signal | Held)], a.op)
    return rearranged(bench.signal(a.args[0]), a)


@rule(*SAME)
def same(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    if not node.meta["val"].is_floating_point() and isinstance(a.args[0], Signal | Held):
        return bench.unknown(node, [a.args[0]], "rounding")
    return a.args[0]


@rule("view_as", "reshape_as")
def view_as(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    return bench.signal(a.args[0]).map(lambda t: t.reshape(shapes_of(node)))


@rule("detach", "detach_copy")
def detach(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    # The function keeps its symmetry, but gradients no longer tell: nothing is conserved across a detached edge.
    value = bench.signal(a.args[0])
    bench.classes.pin(value.labels, Break("it is detached from the gradient"))
    return Signal(value.labels)


@rule("index")
def index(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    where = a.indices
    if any(isinstance(one, Signal | Held) for one in where):
        return bench.unknown(node, [a.self, *(one for one in where if isinstance(one, Signal | Held))], a.op)
    where = [one.cpu() if isinstance(one, Tensor) else one for one in where]
    return bench.signal(a.self).map(lambda t: torch.ops.aten.index.Tensor(t, where))


@rule("cat", "concat", "concatenate", "stack")
def cat(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    parts = [bench.signal(part) for part in a.tensors]
    dim = a.dim if isinstance(a.dim, int) else 0
    join = torch.stack if a.op == "stack" else torch.cat
    labels = join([part.labels for part in parts], dim)
    prints = None
    if any(part.prints is not None for part in parts):
        prints = join([bench.prints_of(part) for part in parts], dim)
    return Signal(labels, prints)


@rule("pad", "constant_pad_nd")
def pad(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value = bench.signal(a.self)
    mode = getattr(a, "mode", "constant")
    if mode != "constant":
        # Reflection and replication copy elements of the same channel when labels do not vary along the padded axes.
        axes = range(value.labels.dim() - len(a.pad) // 2, value.labels.dim())
        labels = bench.classes.reduce(value.labels, axes, "{} is mixed in by padding")
        prints = None if value.prints is None else a.target(value.prints, *a.args[1:], **a.kwargs)
        return Signal(labels.expand(shapes_of(node)), prints)
    if a.value not in (None, 0, 0.0):
        bench.classes.pin(value.labels, Break("padding with a constant other than zero is added"))
    return value.map(lambda t: torch.nn.functional.pad(t, a.pad, value=ZERO if t is value.labels else 0.0))


@rule("zeros_like", "new_zeros")
def zeros(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    return Signal(torch.tensor(ZERO).expand(shapes_of(node)))


@rule("ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_ones", "new_full", "new_empty")
def made(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    return bench.constant(shapes_of(node))
