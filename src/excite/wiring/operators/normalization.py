"""Normalizations: what they read may scale as a whole, and their affine pair makes new channels."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from excite.wiring.channels.labels import Break
from excite.wiring.channels.signals import ChannelContext, ChannelSignal, NormRead, view_shape
from excite.wiring.channels.slots import ParameterView, Slot
from excite.wiring.operators.activations import only
from excite.wiring.operators.arithmetic import layer_label
from excite.wiring.operators.row import SMOOTH, add_row, product_of
from excite.wiring.propagation.counts import PathContext, ScaledCounts
from excite.wiring.propagation.schema import module_of
from excite.wiring.propagation.sensitivity import LipschitzContext, no_bound
from excite.wiring.propagation.written_norms import WrittenNorm, norm_name


def _normalization_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    x = ctx.signal(a.input)
    name = module_of(node) or a.op
    last = len(a.normalized_shape) if a.op in ("layer_norm", "rms_norm") else 0
    _normalize(ctx, x, a, name, last)
    if not isinstance(a.weight, ParameterView):
        source = ctx.constant(x.shape, f"the output of {name}")
        if a.weight is not None:
            ctx.classes.pin(ctx.signal(a.weight).labels, Break(f"the weight of {name} is computed"))
        return source
    shift = getattr(a, "bias", None)
    scale = ctx.signal(a.weight, name).labels
    if shift is not None:
        ctx.classes.unite(scale, ctx.signal(shift, name).labels, "{} is added as a bias")
    ctx.classes.not_mixable(scale)
    shape = tuple(scale.shape) if last else (-1, *[1] * (x.labels.dim() - 2))
    return ChannelSignal(scale.reshape(shape).expand(x.shape))


def _normalize(ctx: ChannelContext, x: ChannelSignal, a: SimpleNamespace, name: str, last: int) -> None:
    """Numbers that are normalized together scale together; the result does not see by how much."""
    classes = ctx.classes
    frozen = not (a.training if a.op == "batch_norm" else a.use_input_stats if a.op == "instance_norm" else True)
    if frozen and ctx.training:
        classes.pin(x.labels, Break(f"{name} shifts by frozen statistics"))
        return
    cause = "{} is normalized with it by " + name
    if last:
        labels = classes.reduce(x.labels, range(-last, 0), cause)
        ctx.norm_reads.append(NormRead(name, a.op, *_by_position(labels)))
    else:
        spatial = range(2, x.labels.dim())
        labels = classes.reduce(x.labels, spatial if a.op == "instance_norm" else [0, *spatial], cause)
        if a.op == "group_norm":
            rows = labels.reshape(labels.shape[0], a.num_groups, -1)
            labels = classes.reduce(rows, [0, 2], cause)
        ctx.norm_reads.append(NormRead(name, a.op, labels.reshape(labels.shape[0], -1)))
    _is_normalized(ctx, labels, name)


def written_norm(norm: WrittenNorm, ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> ChannelSignal:
    """A normalization that is written out: what it reads may scale as a whole, and the result does not see by how much."""
    x, name = ctx.signal(a.args[norm.top]), norm_name(norm)
    labels = ctx.classes.reduce(x.labels, norm.axes, "{} is normalized with it by " + name)
    op = norm.op if norm.form != "other" else "written"
    eps = norm.eps if norm.form == "mean" else 0.0
    ctx.norm_reads.append(NormRead(name, op, *_by_position(labels), eps))
    _is_normalized(ctx, labels, name)
    return ctx.constant(x.shape, f"the output of {name}")


def _by_position(labels: Tensor) -> tuple[Tensor, int | None]:
    """Labels (rows, positions) of what is normalized together along the last axes, which have size one by now.

    There is one position; but if labels differ along exactly one other axis, as those of heads do, one for each of its
    entries: then that axis is returned too, counted from the end.
    """
    along = [i for i in range(labels.dim()) if bool((labels != labels.narrow(i, 0, 1)).any())]
    if len(along) != 1:
        return labels.reshape(-1, 1), None
    axis = along[0]
    return labels.movedim(axis, -1).reshape(-1, labels.shape[axis]), axis - labels.dim()


def _is_normalized(ctx: ChannelContext, labels: Tensor, name: str) -> None:
    for label in ctx.classes.channels(labels):
        state = ctx.classes.state(label)
        state.norms.setdefault(name)
        state.nonlinear = True


def _weight_norm_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    """g v / |v|: each slice of the direction v may scale as a whole, and g makes the rows of the weight."""
    shape = view_shape(a.v)
    if not isinstance(a.v, ParameterView):
        return ctx.unknown(node, [a.v, a.g], "weight_norm")
    order = (a.dim, *(i for i in range(len(shape)) if i != a.dim))
    slot = Slot(a.v, (1, shape[a.dim], 1, math.prod(shape) // shape[a.dim]), order=order)
    for label in ctx.produce(a.v.path, slot, None, None).tolist():
        ctx.classes.state(label).norms.setdefault("weight_norm")
        ctx.classes.state(label).nonlinear = True
    length = ctx.signal(a.g)
    ctx.classes.not_mixable(length.labels)
    return ChannelSignal(length.labels.expand(shape))


def _batch_norm_lipschitz(ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    if a.training or a.running_var is None:
        raise no_bound(node, "batch normalization by the statistics of the batch")
    scale = (a.running_var.double() + a.eps).rsqrt()
    scale = (scale if a.weight is None else scale * a.weight.double()).abs()
    x = only(a, node)
    view = (-1, *[1] * (len(x.shape) - 2))
    return ctx.apply(node, x, layer_label(node, a), lambda: float(scale.max()), lambda t: t * scale.view(view))


def _normalization_paths(ctx: PathContext, node: torch.fx.Node, a: SimpleNamespace) -> ScaledCounts:
    """One edge per number, as if the statistics were constants."""
    x: ScaledCounts = a.args[0]
    return x.plus_one() if ctx.biases and a.bias is not None else x


def _batch_statistics(a: SimpleNamespace) -> str | None:
    batch = getattr(a, "training", False) or getattr(a, "running_mean", None) is None
    return "normalizes by the statistics of the batch" if batch else None


# fmt: off
add_row("batch_norm", channels=_normalization_channels, conservation="norm", lipschitz=_batch_norm_lipschitz,
        paths=_normalization_paths)
add_row("instance_norm layer_norm group_norm", channels=_normalization_channels, conservation="norm", pieces=SMOOTH,
        paths=_normalization_paths)
add_row("rms_norm", channels=_normalization_channels, conservation="norm", pieces=SMOOTH)
add_row("_weight_norm", channels=_weight_norm_channels, conservation="norm")
# The kernels below them: exported graphs do not hold these.
add_row("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm "
        "miopen_batch_norm", pieces=product_of("input", "weight", fixed=("running_mean", "running_var"),
                                               unless=_batch_statistics))
add_row("native_layer_norm native_group_norm _fused_rms_norm _weight_norm_interface", pieces=SMOOTH)
