"""Reductions along axes: sums, means, norms, maxima, order statistics, softmax."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from excite.wiring.channels.signals import ChannelContext, ChannelSignal, fill
from excite.wiring.channels.slots import ParameterView
from excite.wiring.operators.activations import only
from excite.wiring.operators.arithmetic import extreme_lipschitz
from excite.wiring.operators.pooling import MIXED, average_lipschitz
from excite.wiring.operators.row import LINEAR, SMOOTH, add_row, piecewise
from excite.wiring.propagation.counts import PathContext, ScaledCounts
from excite.wiring.propagation.schema import shapes_of
from excite.wiring.propagation.sensitivity import LipschitzContext, Sensitivity


# -- channels -----------------------------------------------------------------------------------------------------------
def _reduced(ctx: ChannelContext, value: ChannelSignal, a: SimpleNamespace) -> Tensor:
    dims = getattr(a, "dim", None)
    axes = range(value.labels.dim()) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    labels = ctx.classes.reduce(value.labels, axes, MIXED + a.op)
    if not getattr(a, "keepdim", False):
        for axis in sorted({axis % max(value.labels.dim(), 1) for axis in axes}, reverse=True):
            labels = labels.squeeze(axis) if labels.dim() else labels
    return labels


def _sum_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value = ctx.signal(a.args[0])
    labels = _reduced(ctx, value, a)
    ctx.pass_through(labels, a)
    prints = None
    if value.prints is not None:
        prints = a.target(value.prints, *a.args[1:], **{k: v for k, v in a.kwargs.items() if k != "dtype"})
    return ChannelSignal(labels, prints)


def _extreme_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    if getattr(a, "other", None) is not None or 0 in (getattr(a, "ord", 2), getattr(a, "p", 2)):
        return ctx.unknown(node, [v for v in a.args if isinstance(v, ChannelSignal | ParameterView)], a.op)
    value = ctx.signal(a.args[0])
    labels = _reduced(ctx, value, a)
    ctx.pass_through(labels, a)
    shapes = shapes_of(node)
    if isinstance(shapes, list):
        return ChannelSignal(labels), ctx.constant(shapes[1])
    return ChannelSignal(labels)


def _cumsum_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value = ctx.signal(a.args[0])
    labels = ctx.classes.reduce(value.labels, [a.dim], MIXED + a.op)
    prints = None if value.prints is None else value.prints.cumsum(a.dim)
    return ChannelSignal(labels.expand(value.shape), prints)


def _softmax_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value = ctx.signal(a.args[0])
    result = ctx.unknown(node, [value], a.op.strip("_"))
    labels = ctx.classes.reduce(value.labels, [a.dim], MIXED + a.op)
    return fill(shapes_of(node), lambda shape: ChannelSignal(labels.expand(shape))) or result


# -- Lipschitz constants ------------------------------------------------------------------------------------------------
def _extreme_lipschitz(ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    """As max pooling with windows that do not overlap."""
    if getattr(a, "other", None) is not None:
        return extreme_lipschitz(ctx, node, SimpleNamespace(**{**vars(a), "op": "maximum"}))
    dims = getattr(a, "dim", None)
    dims = [] if dims is None else [dims] if isinstance(dims, int) else list(dims)
    result = ctx.apply(
        node, only(a, node), a.op, lambda: 1.0, lambda t: t.amax(dims, keepdim=bool(getattr(a, "keepdim", False)))
    )
    return (result, None) if isinstance(shapes_of(node), list) else result


def _softmax_lipschitz(ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Sensitivity:
    """J = diag(p) − p p' for p = softmax(x). Row i of |J| sums to 2 p_i (1 − p_i) ≤ ½, and J is symmetric: ‖J‖₂ ≤ ‖J‖_∞ ≤ ½.

    If element j moves by at most s_j, then |Σ_j J_ij δ_j| ≤ p_i (1 − p_i) (s_i + max s) ≤ ¼ (s_i + max s).
    """
    return ctx.apply(node, only(a, node), a.op, lambda: 0.5, lambda t: 0.25 * (t + t.amax(a.dim, keepdim=True)))


# -- paths --------------------------------------------------------------------------------------------------------------
def _sum_paths(ctx: PathContext, node: torch.fx.Node, a: SimpleNamespace) -> ScaledCounts:
    x: ScaledCounts = a.args[0]
    axes = a.dim if getattr(a, "dim", None) else tuple(range(x.values.dim()))
    return x.through(lambda v: v.sum(axes, keepdim=bool(getattr(a, "keepdim", False))))


# -- pieces: which of several numbers is taken --------------------------------------------------------------------------
def _one_sample(a: SimpleNamespace, result: Tensor) -> Tensor:
    """The pattern, if it is not taken over the batch; else a number of no sample, by which samples cannot be separated."""
    dims = getattr(a, "dim", -1)
    axes = [dims] if isinstance(dims, int) else list(dims or [])
    over = not axes or 0 in [d % max(1, a.self.dim()) for d in axes]
    return result.new_zeros((), dtype=torch.bool) if over else result


def _taken(a: SimpleNamespace, r: Any) -> tuple[Tensor, ...]:
    """The places of what was taken, where the operator gives them."""
    return (_one_sample(a, r[1]) if isinstance(r, tuple) else r.new_zeros((), dtype=torch.bool),)


def _attained(a: SimpleNamespace, r: Any) -> tuple[Tensor, ...]:
    """Where an extreme stands along the axes that were reduced; of ties, everywhere."""
    if hasattr(a, "other"):  # an alias of maximum or minimum
        return (a.self > a.other,)
    if isinstance(r, tuple) and not r[1].is_floating_point():
        return _taken(a, r)
    dims = getattr(a, "dim", None)
    axes = [dims] if isinstance(dims, int) else list(dims or [])
    result = []
    for extreme in r if isinstance(r, tuple) else (r,):
        for axis in [] if getattr(a, "keepdim", False) else sorted(d % a.self.dim() for d in axes):
            extreme = extreme.unsqueeze(axis)
        result.append(_one_sample(SimpleNamespace(self=a.self, dim=axes), a.self == extreme))
    return tuple(result)


def _between(a: SimpleNamespace, r: Any) -> tuple[Tensor, ...]:
    """The place of the k-th value, and which of the others are above it.

    Without these the same element can be the k-th value in several ways, with another linear piece between them.

    Without these the same element can be the median in several ways, with another linear piece between them.
    """
    if not isinstance(r, tuple):
        return _taken(a, r)
    taken = r[0] if getattr(a, "keepdim", False) or not a.self.dim() else r[0].unsqueeze(getattr(a, "dim", -1))
    return (*_taken(a, r), _one_sample(a, a.self > taken))


# fmt: off
# -- rows ---------------------------------------------------------------------------------------------------------------
add_row("mean sum", channels=_sum_channels, conservation="matrix", lipschitz=average_lipschitz, pieces=LINEAR,
        paths=_sum_paths)
add_row("cumsum", channels=_cumsum_channels, conservation="matrix", pieces=LINEAR)
add_row("nansum", conservation="matrix", pieces=LINEAR)
add_row("amax amin max min", channels=_extreme_channels, conservation="channel", lipschitz=_extreme_lipschitz,
        pieces=piecewise(_attained))
add_row("aminmax", pieces=piecewise(_attained))
add_row("sort topk cummax cummin", pieces=piecewise(_taken))
add_row("kthvalue median nanmedian", pieces=piecewise(_between))
add_row("linalg_vector_norm norm", channels=_extreme_channels, conservation="channel", pieces=SMOOTH)
add_row("softmax _softmax", channels=_softmax_channels, conservation="none", lipschitz=_softmax_lipschitz, pieces=SMOOTH)
add_row("log_softmax _log_softmax _safe_softmax", channels=_softmax_channels, conservation="none", pieces=SMOOTH)
add_row("logsumexp logcumsumexp", conservation="none", pieces=SMOOTH)
add_row("std var std_mean var_mean cumprod prod dist renorm _cdist_forward _euclidean_dist _pdist_forward", pieces=SMOOTH)
