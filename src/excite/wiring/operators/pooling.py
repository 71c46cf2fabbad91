"""Pooling and resampling: every output is made of a window of elements of one channel."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from excite.wiring.channels.signals import ChannelContext, ChannelSignal
from excite.wiring.operators.activations import only
from excite.wiring.operators.row import LINEAR, add_row, piecewise, product_of
from excite.wiring.propagation.counts import PathContext, ScaledCounts
from excite.wiring.propagation.operator_norms import positive_norm, windows_per_element
from excite.wiring.propagation.schema import first_shape, shapes_of
from excite.wiring.propagation.sensitivity import LipschitzContext

MIXED = "{} is mixed in by "


# -- channels -----------------------------------------------------------------------------------------------------------
def _spatial(name: str) -> int:
    return next(n for n in (1, 2, 3) if f"{n}d" in name)


def _max_pool_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value = ctx.signal(a.args[0])
    axes = range(-_spatial(a.op), 0)
    labels = ctx.classes.reduce(value.labels, axes, MIXED + a.op)
    ctx.pass_through(labels, a)
    shapes = shapes_of(node)
    if isinstance(shapes, list):
        return ChannelSignal(labels.expand(shapes[0])), ctx.constant(shapes[1])
    return ChannelSignal(labels.expand(shapes))


def _average_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value = ctx.signal(a.args[0])
    labels = ctx.classes.reduce(value.labels, range(-_spatial(a.op), 0), MIXED + a.op)
    ctx.pass_through(labels, a)
    prints = None if value.prints is None else a.target(value.prints.contiguous(), *a.args[1:], **a.kwargs)
    return ChannelSignal(labels.expand(shapes_of(node)), prints)


# -- Lipschitz constants ------------------------------------------------------------------------------------------------
def average_lipschitz(ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    """Linear maps without negative weights."""
    x = only(a, node)
    kwargs = {key: value for key, value in a.kwargs.items() if key != "dtype"}

    def function(t: Tensor) -> Tensor:
        return a.target(t, *a.args[1:], **kwargs)  # type: ignore[no-any-return]

    return ctx.apply(node, x, a.op, lambda: positive_norm(function, x.shape), function)


def per_axis(value: Any, axes: int) -> list[int]:
    """A setting of a layer as one number per axis."""
    values = [value] if isinstance(value, int) else list(value)
    return values * axes if len(values) == 1 else values


def _max_pool_lipschitz(ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    """Lipschitz constant of max pooling.

    |max over w of x − max over w of y| ≤ max over w of |x − y|, so the deviations are pooled like the numbers. In the 2-norm
    Σ_w max_w |x − y|² ≤ Σ_j (windows with j) |x_j − y_j|²: the root of the number of windows an element is in.
    """
    x = only(a, node)
    axes = next(n for n in (1, 2, 3) if f"{n}d" in a.op)
    sizes, outs = x.shape[-axes:], first_shape(node)[-axes:]

    def factor() -> float:
        return math.sqrt(math.prod(_overlap(a, axes, i, sizes[i], outs[i]) for i in range(axes)))

    def pooled(t: Tensor) -> Tensor:
        result = a.target(t, *a.args[1:], **a.kwargs)
        return result[0] if isinstance(result, tuple) else result  # type: ignore[no-any-return]

    result = ctx.apply(node, x, a.op, factor, pooled)
    return (result, None) if isinstance(shapes_of(node), list) else result


def _overlap(a: SimpleNamespace, axes: int, axis: int, size: int, out: int) -> int:
    """The number of windows an element is in, along one axis."""
    if a.op.startswith("adaptive"):
        return windows_per_element(size, out, lambda i: range(i * size // out, -(-(i + 1) * size // out)))
    kernel, dilation, padding = (per_axis(v, axes)[axis] for v in (a.kernel_size, a.dilation, a.padding))
    stride = per_axis(a.stride or a.kernel_size, axes)[axis]
    return windows_per_element(size, out, lambda i: [i * stride - padding + dilation * t for t in range(kernel)])


# -- paths --------------------------------------------------------------------------------------------------------------
def _pool_paths(ctx: PathContext, node: torch.fx.Node, a: SimpleNamespace) -> ScaledCounts | None:
    """The sum over each window: all its elements lead on. Padding leads nowhere."""
    n = _spatial(a.op)
    if any(d != 1 for d in per_axis(getattr(a, "dilation", 1), n)) or a.ceil_mode:
        return None
    size, pad = per_axis(a.kernel_size, n), per_axis(a.padding, n)
    stride = per_axis(a.stride, n) if a.stride not in (None, [], ()) else size
    pool = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[n]
    x: ScaledCounts = a.args[0]
    return x.through(lambda v: pool(v, size, stride, pad, count_include_pad=True) * math.prod(size))


def _adaptive_paths(ctx: PathContext, node: torch.fx.Node, a: SimpleNamespace) -> ScaledCounts:
    sizes = per_axis(a.output_size, 1)

    def change(v: Tensor) -> Tensor:
        for k, out in enumerate(sizes):
            axis = v.dim() - len(sizes) + k
            into = v.shape[axis]
            windows = [(i * into // out, -(-(i + 1) * into // out)) for i in range(out)]
            v = torch.stack([v.narrow(axis, low, high - low).sum(axis) for low, high in windows], axis)
        return v

    x: ScaledCounts = a.args[0]
    return x.through(change)


# fmt: off
# -- rows: maxima -------------------------------------------------------------------------------------------------------
_PLACES = piecewise(lambda a, r: (r[1],))
# Without gradients max_pool1d does not say which element it took.
_PLACES_1D = piecewise(lambda a, r: (torch.ops.aten.max_pool1d_with_indices(*a.args, **a.kwargs)[1],))
add_row("max_pool1d", channels=_max_pool_channels, conservation="channel", lipschitz=_max_pool_lipschitz,
        pieces=_PLACES_1D, paths=_pool_paths)
add_row("max_pool2d max_pool3d", channels=_max_pool_channels, conservation="channel", lipschitz=_max_pool_lipschitz,
        paths=_pool_paths)
add_row("max_pool1d_with_indices", channels=_max_pool_channels, conservation="channel")
add_row("max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d",
        channels=_max_pool_channels, conservation="channel", lipschitz=_max_pool_lipschitz, pieces=_PLACES)
add_row("adaptive_max_pool1d", channels=_max_pool_channels, conservation="channel", lipschitz=_max_pool_lipschitz)
add_row("fractional_max_pool2d fractional_max_pool3d", conservation="channel", pieces=_PLACES)

# -- rows: averages -----------------------------------------------------------------------------------------------------
add_row("avg_pool1d", channels=_average_channels, conservation="matrix", lipschitz=average_lipschitz, paths=_pool_paths)
add_row("avg_pool2d avg_pool3d", channels=_average_channels, conservation="matrix", lipschitz=average_lipschitz,
        pieces=LINEAR, paths=_pool_paths)
add_row("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", channels=_average_channels, conservation="matrix",
        lipschitz=average_lipschitz, paths=_adaptive_paths)
add_row("_adaptive_avg_pool2d _adaptive_avg_pool3d", channels=_average_channels, conservation="matrix",
        lipschitz=average_lipschitz, pieces=LINEAR, paths=_adaptive_paths)

# -- rows: resampling ---------------------------------------------------------------------------------------------------
add_row("upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
        "upsample_trilinear3d", channels=_average_channels, conservation="matrix", lipschitz=average_lipschitz,
        pieces=LINEAR)
add_row("_upsample_nearest_exact2d upsample_bicubic2d", channels=_average_channels, conservation="matrix", pieces=LINEAR)
add_row("_upsample_nearest_exact1d _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa",
        conservation="matrix", pieces=LINEAR)
add_row("grid_sampler_2d grid_sampler_3d", pieces=product_of("input", fixed=("grid",)))
