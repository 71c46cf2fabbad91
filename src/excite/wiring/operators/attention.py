"""Attention, and other kernels that fuse several layers: recurrent cells, encoder layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from excite.wiring.channels.labels import Break
from excite.wiring.channels.signals import ChannelContext, ChannelSignal
from excite.wiring.operators.row import SMOOTH, add_row
from excite.wiring.propagation.schema import shapes_of

_SUMMED = "{} is summed with it"


def _attention_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    """softmax(QK') V.

    Channels of Q may scale if those of K do so inversely; V passes, mixed over positions by the same map for all channels of a head.
    """
    classes = ctx.classes
    query, key, value = (ctx.signal(operand) for operand in (a.query, a.key, a.value))
    shape = shapes_of(node)
    if a.attn_mask is not None:
        classes.pin(ctx.signal(a.attn_mask).labels, Break(a.op, function=True))
    if a.enable_gqa and query.labels.dim() > 2 and query.shape[-3] % key.shape[-3] == 0:  # heads of a group share a key
        per = query.shape[-3] // key.shape[-3]
        key, value = (operand.map(lambda t: t.repeat_interleave(per, -3)) for operand in (key, value))
    if not query.labels.dim() == key.labels.dim() == value.labels.dim() == len(shape):
        return ctx.unknown(node, [query, key, value], a.op)
    heads = ctx.random(*shape[:-2], 1, 1)  # distinguishes the channels of one head from those of another
    axes = [0, -2] if len(shape) > 2 else [-2]
    reduced = []
    for operand in (query, key):
        labels = classes.reduce(operand.labels, axes, _SUMMED)
        classes.pass_through(labels, a.op, linear=operand.prints is not None)
        if operand.prints is not None:
            rows = (operand.prints * heads).movedim((0, -2), (-2, -1)) if len(shape) > 2 else operand.prints.T
            rows = rows.reshape(labels.numel(), -1)
            ctx.more_prints.append((labels.reshape(-1), rows @ ctx.random(rows.shape[1], 2)))
        reduced.append(labels)
    ctx.relations.invert(reduced[0], reduced[1], Break(a.op, function=True))
    labels = classes.reduce(value.labels, [-2], _SUMMED)
    classes.pass_through(labels, a.op, linear=True)
    prints = None
    if value.prints is not None:
        prints = ctx.random(*shape[:-1], value.shape[-2]) @ value.prints
    return ChannelSignal(labels.expand(shape), prints)


# fmt: off
add_row("scaled_dot_product_attention", channels=_attention_channels, conservation="matrix", pieces=SMOOTH)
add_row("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention _scaled_dot_product_cudnn_attention "
        "_transformer_encoder_layer_fwd _native_multi_head_attention", pieces=SMOOTH)
add_row("_thnn_fused_lstm_cell _thnn_fused_gru_cell mkldnn_rnn_layer _cudnn_rnn", conservation="none", pieces=SMOOTH)
