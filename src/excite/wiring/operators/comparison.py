"""Comparisons, signs and searches: results that are constant on pieces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from excite.wiring.channels.signals import ChannelContext, ChannelSignal
from excite.wiring.channels.slots import ParameterView
from excite.wiring.operators.row import DISCRETE, add_row, piecewise


def _compare_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    """A comparison with zero does not see positive factors."""
    if a.op == "sign" or (isinstance(a.other, int | float) and a.other == 0):
        value = ctx.signal(a.self)
        ctx.classes.not_mixable(value.labels)
        return ctx.constant(value.shape)
    return ctx.unknown(node, [v for v in (a.self, a.other) if isinstance(v, ChannelSignal | ParameterView)], a.op)


# fmt: off
add_row("gt ge lt le eq ne sign", channels=_compare_channels, conservation="channel", pieces=DISCRETE)
add_row("isnan isinf isposinf isneginf signbit logical_not logical_and logical_or logical_xor any all", pieces=DISCRETE)
add_row("argmax argmin bucketize searchsorted count_nonzero sgn", pieces=DISCRETE)
add_row("heaviside", pieces=piecewise(lambda a, r: (a.self > 0, a.self < 0)))
