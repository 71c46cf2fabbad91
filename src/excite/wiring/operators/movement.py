"""Operators that move, repeat, join and create numbers without changing them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from excite.wiring.channels.labels import ZERO, Break
from excite.wiring.channels.signals import ChannelContext, ChannelSignal
from excite.wiring.channels.slots import ParameterView, replay
from excite.wiring.operators.activations import only, unchanged
from excite.wiring.operators.arithmetic import deviation_of, root_of_squares
from excite.wiring.operators.row import CONSTANT, LINEAR, Pieces, add_row
from excite.wiring.propagation.counts import PathContext, ScaledCounts
from excite.wiring.propagation.operator_norms import copies
from excite.wiring.propagation.schema import shapes_of
from excite.wiring.propagation.sensitivity import LipschitzContext, Sensitivity, no_bound

# Views of a parameter stay that parameter; of an activation, its labels are rearranged by the operator itself.
VIEWS = (
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "transpose", "permute", "t", "numpy_T", "mT", "squeeze",
    "unsqueeze", "select", "slice", "narrow", "movedim", "swapaxes", "swapdims", "moveaxis", "diagonal", "flip", "roll",
    "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "unsafe_chunk", "unsafe_split", "ravel",
)  # fmt: skip
# These repeat entries: a parameter that goes through them is an activation from there on.
REPEATS = ("expand", "expand_as", "repeat", "tile", "repeat_interleave", "unfold", "pixel_shuffle", "pixel_unshuffle",
           "channel_shuffle", "index_select", "take_along_dim", "broadcast_to")  # fmt: skip
SAME = ("contiguous", "clone", "alias", "_to_copy", "to", "lift_fresh_copy", "type_as", "positive", "cpu")  # fmt: skip


# -- channels -----------------------------------------------------------------------------------------------------------
def rearranged(value: ChannelSignal, a: SimpleNamespace) -> Any:
    """The same operator applied to labels and fingerprints."""
    arguments = a.args[1:]
    step = (a.target, arguments, tuple(a.kwargs.items()))
    labels = replay((step,), value.labels)
    prints = None if value.prints is None else replay((step,), value.prints)
    if isinstance(labels, tuple | list):
        return tuple(ChannelSignal(chunk, None if prints is None else prints[i]) for i, chunk in enumerate(labels))
    return ChannelSignal(labels, prints)


def _view_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value = a.args[0]
    if isinstance(value, ParameterView):
        view = value.then(a.target, *a.args[1:], **a.kwargs)
        shapes = shapes_of(node)
        return tuple(view.item(i) for i in range(len(shapes))) if isinstance(shapes, list) else view
    return rearranged(ctx.signal(value), a)


def _repeat_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    if any(isinstance(other, ChannelSignal | ParameterView) for other in a.args[1:]):
        if a.op == "expand_as":
            return ctx.signal(a.args[0]).map(lambda t: t.expand(shapes_of(node)))
        return ctx.unknown(node, [v for v in a.args if isinstance(v, ChannelSignal | ParameterView)], a.op)
    return rearranged(ctx.signal(a.args[0]), a)


def _same_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    if not node.meta["val"].is_floating_point() and isinstance(a.args[0], ChannelSignal | ParameterView):
        return ctx.unknown(node, [a.args[0]], "rounding")
    return a.args[0]


def _view_as_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    return ctx.signal(a.args[0]).map(lambda t: t.reshape(shapes_of(node)))


def _as_complex_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    # A rotation mixes the two parts of a number: they scale together.
    labels = ctx.signal(a.args[0]).labels
    return ChannelSignal(ctx.classes.reduce(labels, [-1], "{} is part of a complex number")[..., 0])


def _as_real_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    return ChannelSignal(ctx.signal(a.args[0]).labels[..., None].expand(shapes_of(node)))


def _detach_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    # The function keeps its symmetry, but gradients no longer show it: nothing is conserved across a detached edge.
    value = ctx.signal(a.args[0])
    ctx.classes.pin(value.labels, Break("it is detached from the gradient"))
    return ChannelSignal(value.labels)


def _index_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    indices = a.indices
    if any(isinstance(index, ChannelSignal | ParameterView) for index in indices):
        return ctx.unknown(
            node, [a.self, *(index for index in indices if isinstance(index, ChannelSignal | ParameterView))], a.op
        )
    indices = [index.cpu() if isinstance(index, Tensor) else index for index in indices]
    return ctx.signal(a.self).map(lambda t: torch.ops.aten.index.Tensor(t, indices))


def _cat_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    signals = [ctx.signal(operand) for operand in a.tensors]
    dim = a.dim if isinstance(a.dim, int) else 0
    join = torch.stack if a.op == "stack" else torch.cat
    labels = join([operand.labels for operand in signals], dim)
    prints = None
    if any(operand.prints is not None for operand in signals):
        prints = join([ctx.prints_of(operand) for operand in signals], dim)
    return ChannelSignal(labels, prints)


def _pad_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value = ctx.signal(a.self)
    mode = getattr(a, "mode", "constant")
    if mode != "constant":
        # Reflection and replication copy elements of the same channel when labels do not vary along the padded axes.
        axes = range(value.labels.dim() - len(a.pad) // 2, value.labels.dim())
        labels = ctx.classes.reduce(value.labels, axes, "{} is mixed in by padding")
        prints = None if value.prints is None else a.target(value.prints, *a.args[1:], **a.kwargs)
        return ChannelSignal(labels.expand(shapes_of(node)), prints)
    if a.value not in (None, 0, 0.0):
        ctx.classes.pin(value.labels, Break("padding with a constant other than zero is added"))
    return value.map(lambda t: torch.nn.functional.pad(t, a.pad, value=ZERO if t is value.labels else 0.0))


def _zeros_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    return ChannelSignal(torch.tensor(ZERO).expand(shapes_of(node)))


def _created_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    return ctx.constant(shapes_of(node))


# -- Lipschitz constants: in the 2-norm a number that is copied n times counts sqrt(n) times -----------------------------
def _move_lipschitz(ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    x = only(a, node)
    shapes = shapes_of(node)
    if a.op in SAME or a.op == "detach":
        if not node.meta["val"].is_floating_point():
            raise no_bound(node, "rounding to integers")
        return x
    deviation = None if x.deviation is None else replay(((a.target, a.args[1:], tuple(a.kwargs.items())),), x.deviation)
    if isinstance(shapes, list):
        return tuple(
            Sensitivity(x.factor, s) if deviation is None else Sensitivity.from_deviation(deviation[i])
            for i, s in enumerate(shapes)
        )
    return Sensitivity(x.factor, shapes) if deviation is None else Sensitivity.from_deviation(deviation)


def _repeat_lipschitz(ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    x = only(a, node)

    def function(t: Tensor) -> Tensor:
        if a.op in ("pad", "constant_pad_nd"):  # the constant itself does not move
            return F.pad(t, list(a.pad), mode=getattr(a, "mode", "constant"))
        if a.op == "index":
            return torch.ops.aten.index.Tensor(t, a.indices)  # type: ignore[no-any-return]
        return a.target(t, *a.args[1:], **a.kwargs)  # type: ignore[no-any-return]

    return ctx.apply(node, x, a.op, lambda: math.sqrt(copies(function, x.shape)), function)


def _cat_lipschitz(ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    join = torch.stack if a.op == "stack" else torch.cat
    return ctx.combine(
        node,
        "concatenation",
        lambda: root_of_squares(a.tensors),
        lambda: join([deviation_of(operand) for operand in a.tensors], a.dim or 0),
    )


# -- paths --------------------------------------------------------------------------------------------------------------
def _moved_paths(ctx: PathContext, node: torch.fx.Node, a: SimpleNamespace) -> ScaledCounts | tuple[ScaledCounts, ...]:
    x = a.args[0]
    # The numbers lie in memory as they come: a view of the original may need a copy here.
    op = torch.ops.aten.reshape.default if a.op == "view" else a.target
    moved = x.values.clone() if a.op in SAME else op(x.values, *a.args[1:], **a.kwargs)
    if isinstance(moved, tuple | list):
        return tuple(ScaledCounts(counts, x.power) for counts in moved)
    return ScaledCounts(moved, x.power)


def _cat_paths(ctx: PathContext, node: torch.fx.Node, a: SimpleNamespace) -> ScaledCounts:
    operands = [
        operand if isinstance(operand, ScaledCounts) else ScaledCounts(torch.zeros_like(operand, dtype=torch.float64))
        for operand in a.tensors
    ]
    power = max(operand.power for operand in operands)
    join = torch.stack if a.op == "stack" else torch.cat
    return ScaledCounts(join([operand.at(power) for operand in operands], a.dim or 0), power)


# -- pieces -------------------------------------------------------------------------------------------------------------
def _casts_bits(a: SimpleNamespace) -> str | None:
    return "reads the bits of numbers as another type" if getattr(a, "dtype", None) is not None else None


# fmt: off
# -- rows: views, copies and repetitions; those that PyTorch dispatches to have `pieces` --------------------------------
_DISPATCHED = {
    "_to_copy", "_unsafe_view", "alias", "channel_shuffle", "clone", "diagonal", "expand", "flip", "index_select",
    "permute", "pixel_shuffle", "pixel_unshuffle", "repeat", "roll", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unbind", "unfold", "unsafe_split", "unsqueeze",
}  # fmt: skip
for _name in VIEWS:
    _pieces = Pieces("linear", unless=_casts_bits) if _name == "view" else LINEAR if _name in _DISPATCHED else None
    add_row(
        _name,
        channels=_view_channels,
        conservation="matrix",
        lipschitz=_move_lipschitz,
        pieces=_pieces,
        paths=_moved_paths,
    )
for _name in REPEATS:
    add_row(
        _name,
        channels=_repeat_channels,
        conservation="matrix",
        lipschitz=_repeat_lipschitz,
        pieces=LINEAR if _name in _DISPATCHED else None,
        paths=_moved_paths,
    )
for _name in SAME:
    add_row(
        _name,
        channels=_same_channels,
        conservation="matrix",
        lipschitz=_move_lipschitz,
        pieces=LINEAR if _name in _DISPATCHED else None,
        paths=_moved_paths,
    )
add_row(
    "detach", channels=_detach_channels, conservation="none", lipschitz=_move_lipschitz, pieces=LINEAR, paths=unchanged
)
add_row("detach_copy", channels=_detach_channels, conservation="none")
add_row("view_as_complex", channels=_as_complex_channels, conservation="channel", pieces=LINEAR)
add_row("view_as_real", channels=_as_real_channels, conservation="channel", pieces=LINEAR)
add_row("view_as reshape_as", channels=_view_as_channels, conservation="matrix")
add_row(
    "_reshape_alias as_strided copy diag_embed rot90 tril triu _conj _neg_view col2im im2col unsafe_split_with_sizes",
    pieces=LINEAR,
)

# -- rows: selections, joins and padding --------------------------------------------------------------------------------
add_row("index", channels=_index_channels, conservation="matrix", lipschitz=_repeat_lipschitz, pieces=LINEAR)
add_row(
    "cat stack",
    channels=_cat_channels,
    conservation="matrix",
    lipschitz=_cat_lipschitz,
    pieces=LINEAR,
    paths=_cat_paths,
)
add_row("concat concatenate", channels=_cat_channels, conservation="matrix", lipschitz=_cat_lipschitz, paths=_cat_paths)
add_row("pad", channels=_pad_channels, conservation="matrix", lipschitz=_repeat_lipschitz)
add_row("constant_pad_nd", channels=_pad_channels, conservation="matrix", lipschitz=_repeat_lipschitz, pieces=LINEAR)
add_row(
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d",
    conservation="matrix",
    pieces=LINEAR,
)
add_row(
    "gather take _unsafe_index index_add index_copy index_fill index_put scatter scatter_add slice_scatter select_scatter "
    "diagonal_scatter max_unpool2d max_unpool3d fill zero",
    pieces=LINEAR,
)

# -- rows: creation; only shapes are read -------------------------------------------------------------------------------
add_row("zeros_like new_zeros", channels=_zeros_channels, conservation="matrix", pieces=CONSTANT)
add_row(
    "ones_like full_like empty_like new_ones new_full new_empty",
    channels=_created_channels,
    conservation="matrix",
    pieces=CONSTANT,
)
add_row("rand_like randn_like", channels=_created_channels, conservation="matrix")
add_row("new_empty_strided", conservation="matrix", pieces=CONSTANT)
