"""Convolutions and transposed convolutions."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from excite.wiring.channels.signals import ChannelContext, projected, view_shape
from excite.wiring.channels.slots import ParameterView, conv_slot
from excite.wiring.operators.arithmetic import layer_label
from excite.wiring.operators.linear import READ, affine_paths, check_constant_weight, computed_weight, patterned
from excite.wiring.operators.pooling import per_axis
from excite.wiring.operators.row import add_row, product_of
from excite.wiring.propagation.operator_norms import convolution_norm, spectral_bound
from excite.wiring.propagation.schema import shapes_of
from excite.wiring.propagation.sensitivity import LipschitzContext, Sensitivity


def _convolution_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    layer = ctx.layer(a.weight, node)
    x = ctx.signal(a.input)
    weight = view_shape(a.weight)
    axis = x.labels.dim() - (len(weight) - 1)  # an input without a batch axis is allowed
    transposed = a.transposed if a.op == "convolution" else "transpose" in a.op
    if not isinstance(a.weight, ParameterView):
        return computed_weight(ctx, node, layer, a, axis, 1 if transposed else 0)
    other_axes = [i for i in range(x.labels.dim()) if i != axis]
    inp = ctx.classes.reduce(x.labels, other_axes, READ).reshape(-1)
    slot = conv_slot(a.weight, weight, a.groups, transposed)
    out = ctx.produce(layer, slot, inp, projected(ctx, x.prints, axis))
    ctx.add_bias(layer, a.bias, out)
    return patterned(ctx, out, shapes_of(node), axis)


def _convolution_lipschitz(ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    axes = a.weight.dim() - 2

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return getattr(F, a.op)(x, weight, None, a.stride, a.padding, a.dilation, a.groups)  # type: ignore[no-any-return]

    def spectrum() -> float | None:
        return spectral_bound(a.weight, a.input.shape[-axes:], per_axis(a.dilation, axes), a.groups)

    return _convolved(ctx, node, a, function, spectrum)


def _transposed_lipschitz(ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        settings = (a.stride, a.padding, a.output_padding, a.groups, a.dilation)
        return getattr(F, a.op)(x, weight, None, *settings)  # type: ignore[no-any-return]

    return _convolved(ctx, node, a, function, lambda: None)


def _convolved(
    ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace, function: Any, spectrum: Any
) -> Sensitivity:
    check_constant_weight(node, a)
    weight = a.weight.double()
    label = layer_label(node, a)
    if ctx.norm == "inf":
        return ctx.apply(node, a.input, label, lambda: math.inf, lambda t: function(t, weight.abs()))
    shape = (1, *a.input.shape[-(weight.dim() - 1) :])
    norm, exact = convolution_norm(function, weight, shape, spectrum)
    return ctx.apply(node, a.input, label if exact else f"{label} (bound)", lambda: norm, lambda t: t)


# fmt: off
add_row("conv1d conv2d conv3d", channels=_convolution_channels, conservation="matrix", lipschitz=_convolution_lipschitz,
        paths=affine_paths)
add_row("conv_transpose1d conv_transpose2d conv_transpose3d", channels=_convolution_channels, conservation="matrix",
        lipschitz=_transposed_lipschitz, paths=affine_paths)
add_row("convolution", channels=_convolution_channels, conservation="matrix", pieces=product_of("input", "weight"))
