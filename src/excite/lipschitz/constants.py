"""Activations and affine layers: largest slopes and operator norms."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from excite.lipschitz.movements import only, per_axis
from excite.wiring.channels.signals import module_of
from excite.wiring.propagation.operator_norms import convolution_norm, matrix_norm, spectral_bound
from excite.wiring.propagation.sensitivity import Reach, Walk, first_shape, rule, unknown

# Largest slopes; those that are not round numbers are rounded up.
SLOPES = {
    "relu": 1.0, "abs": 1.0, "neg": 1.0, "tanh": 1.0, "sin": 1.0, "cos": 1.0, "atan": 1.0, "relu6": 1.0,
    "hardtanh": 1.0, "softplus": 1.0, "log_sigmoid": 1.0, "celu": 1.0, "clamp": 1.0, "clamp_min": 1.0,
    "clamp_max": 1.0, "dropout": 1.0, "feature_dropout": 1.0, "alpha_dropout": 1.0, "feature_alpha_dropout": 1.0,
    "sigmoid": 0.25, "hardsigmoid": 0.16666668, "hardswish": 1.5, "erf": 2 / math.sqrt(math.pi),
    "gelu": 1.1291, "silu": 1.0999, "mish": 1.0886, "selu": 1.7581,
}  # fmt: skip


def _elementwise(walk: Walk, node: torch.fx.Node, a: SimpleNamespace, slope: float) -> Reach:
    return walk.step(node, only(a, node), a.op, lambda: slope, lambda t: slope * t)


def _layer(node: torch.fx.Node, a: SimpleNamespace) -> str:
    return module_of(node) or str(a.op)


@rule(*SLOPES)
def activation(walk: Walk, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    if "dropout" in a.op and a.train and a.p > 0:
        raise unknown(node, f"{a.op} that is active in evaluation mode")
    return _elementwise(walk, node, a, SLOPES[a.op])


@rule("leaky_relu", "rrelu")
def leaky_relu(walk: Walk, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    below = a.negative_slope if a.op == "leaky_relu" else (float(a.lower) + float(a.upper)) / 2
    return _elementwise(walk, node, a, max(1.0, abs(below)))


@rule("elu")
def elu(walk: Walk, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    return _elementwise(walk, node, a, abs(a.scale) * max(1.0, abs(a.alpha * a.input_scale)))


@rule("prelu")
def prelu(walk: Walk, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    return _elementwise(walk, node, a, max(1.0, float(a.weight.abs().max())))


def _check_constant(node: torch.fx.Node, a: SimpleNamespace) -> None:
    if not isinstance(a.input, Reach) or not isinstance(a.weight, Tensor) or isinstance(a.bias, Reach):
        raise unknown(node, "a layer whose weight depends on the input")


@rule("linear")
def linear(walk: Walk, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    _check_constant(node, a)
    weight = a.weight.double()
    return walk.step(node, a.input, _layer(node, a), lambda: matrix_norm(weight), lambda t: F.linear(t, weight.abs()))


@rule("conv1d", "conv2d", "conv3d")
def convolution(walk: Walk, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    axes = a.weight.dim() - 2

    def function(x: Tensor, weight: Tensor) -> Tensor:
        return getattr(F, a.op)(x, weight, None, a.stride, a.padding, a.dilation, a.groups)  # type: ignore[no-any-return]

    def spectrum() -> float | None:
        return spectral_bound(a.weight, a.input.shape[-axes:], per_axis(a.dilation, axes), a.groups)

    return _convolved(walk, node, a, function, spectrum)


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed(walk: Walk, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        settings = (a.stride, a.padding, a.output_padding, a.groups, a.dilation)
        return getattr(F, a.op)(x, weight, None, *settings)  # type: ignore[no-any-return]

    return _convolved(walk, node, a, function, lambda: None)


def _convolved(walk: Walk, node: torch.fx.Node, a: SimpleNamespace, function: Any, spectrum: Any) -> Reach:
    _check_constant(node, a)
    weight = a.weight.double()
    what = _layer(node, a)
    if walk.norm == "inf":
        return walk.step(node, a.input, what, lambda: math.inf, lambda t: function(t, weight.abs()))
    shape = (1, *a.input.shape[-(weight.dim() - 1) :])
    norm, exact = convolution_norm(function, weight, shape, spectrum)
    return walk.step(node, a.input, what if exact else f"{what} (bound)", lambda: norm, lambda t: t)


@rule("matmul", "mm", "bmm", "addmm")
def matmul(walk: Walk, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    x, y = a.args[1:3] if a.op == "addmm" else a.args[:2]
    moving, weight = (x, y) if isinstance(x, Reach) else (y, x)
    if not isinstance(weight, Tensor) or (a.op == "addmm" and (isinstance(a.self, Reach) or abs(a.alpha) != 1)):
        raise unknown(node, "the product of two activations")
    # A matrix that is repeated over the batch is fine; an activation that is repeated over matrices is not covered.
    shape = moving.shape
    if min(len(shape), weight.dim()) < 2 or (*shape[:-2], 0) != (*first_shape(node)[:-2], 0):
        raise unknown(node, f"{a.op} of tensors of these shapes")
    weight = weight.double()
    return walk.step(
        node,
        moving,
        _layer(node, a),
        lambda: matrix_norm(weight),
        lambda t: t @ weight.abs() if moving is x else weight.abs() @ t,
    )


@rule("batch_norm")
def batch_norm(walk: Walk, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    if a.training or a.running_var is None:
        raise unknown(node, "batch normalization by the statistics of the batch")
    scale = (a.running_var.double() + a.eps).rsqrt()
    scale = (scale if a.weight is None else scale * a.weight.double()).abs()
    x = only(a, node)
    view = (-1, *[1] * (len(x.shape) - 2))
    return walk.step(node, x, _layer(node, a), lambda: float(scale.max()), lambda t: t * scale.view(view))


@rule("mul", "multiply", "div", "divide", "true_divide")
def multiply(walk: Walk, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    by = a.op not in ("mul", "multiply")
    x, y = a.self, a.other
    if not by and not isinstance(x, Reach):
        x, y = y, x
    if not isinstance(x, Reach) or isinstance(y, Reach):
        raise unknown(node, "division by an activation" if by else "the product of two activations")
    if getattr(a, "rounding_mode", None) is not None:
        raise unknown(node, "division with rounding")
    number = y.double() if isinstance(y, Tensor) else torch.tensor(float(y), dtype=torch.float64)
    number = (1 / number if by else number).abs()
    repeats = math.prod(first_shape(node)) / max(math.prod(x.shape), 1)  # x may be broadcast against the constant
    return walk.step(node, x, _layer(node, a), lambda: float(number.max()) * math.sqrt(repeats), lambda t: t * number)
