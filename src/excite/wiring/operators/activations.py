"""Elementwise functions of one tensor: activations, and the functions of mathematics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from excite.wiring.channels.labels import Break
from excite.wiring.channels.signals import ChannelContext, ChannelSignal
from excite.wiring.operators.row import DISCRETE, LINEAR, SMOOTH, ActivationKinks, Pieces, add_row, piecewise
from excite.wiring.propagation.counts import PathContext, ScaledCounts
from excite.wiring.propagation.sensitivity import LipschitzContext, Sensitivity, no_bound

# -- where they bend ----------------------------------------------------------------------------------------------------
AT_ZERO = ActivationKinks(lambda *args, **kwargs: (0.0,))
BENT = ActivationKinks(lambda *args, **kwargs: (0.0,), smooth=True)  # smooth: active above 0
RANGE = ActivationKinks(lambda min=None, max=None, **kwargs: (min, max))
SHRINK = ActivationKinks(lambda lambd=0.5: (-lambd, lambd), lower=False)


def bends(activation: ActivationKinks, **refusals: Any) -> Pieces:
    """Linear between the kinks of an activation."""

    def pattern(a: SimpleNamespace, result: Tensor) -> tuple[Tensor, ...]:
        return tuple(a.self > kink for kink in activation.kinks(*a.args[1:], **a.kwargs))

    return piecewise(pattern, **refusals)


def _clamp_pattern(a: SimpleNamespace, r: Tensor) -> tuple[Tensor | None, ...]:
    low, high = getattr(a, "min", None), getattr(a, "max", None)
    crossed = (low > high).expand_as(r) if isinstance(low, Tensor) and isinstance(high, Tensor) else None
    return (None if low is None else a.self > low, None if high is None else a.self > high, crossed)


def _draws(a: SimpleNamespace) -> str | None:
    return "draws random numbers in training mode" if a.training else None


def _complex(a: SimpleNamespace) -> str | None:
    return "of complex numbers is not piecewise linear" if a.self.is_complex() else None


# -- channels -----------------------------------------------------------------------------------------------------------
def homogeneous(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> ChannelSignal:
    """f(a x) = a f(x) for every a > 0."""
    value = ctx.signal(a.args[0])
    ctx.pass_through(value.labels, a)
    return ChannelSignal(value.labels)


def _prelu_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> ChannelSignal:
    slope = ctx.signal(a.args[1])
    ctx.classes.exclude(slope.labels, Break("a slope has no scale of its own"))
    return homogeneous(ctx, node, a)


def _negative(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> ChannelSignal:
    value = ctx.signal(a.args[0])
    return ChannelSignal(value.labels, None if value.prints is None else -value.prints)


def _dropout_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value = ctx.signal(a.input)
    if a.p > 0:  # masks differ between channels; the law is about training, whatever mode the model is in now
        ctx.classes.pass_through(value.labels, "dropout", linear=False)
        value = ChannelSignal(value.labels)
    return (value, ctx.constant(value.shape)) if a.op == "native_dropout" else value


def _clamp_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    ends = (getattr(a, "min", None), getattr(a, "max", None))
    if a.op == "hardtanh" or any(not isinstance(end, int | float | None) for end in ends):
        return ctx.unknown(node, [a.args[0]], a.op)
    if any(end is not None and end != 0 and not math.isinf(end) for end in ends):
        return ctx.unknown(node, [a.args[0]], a.op)
    return homogeneous(ctx, node, a)


def _glu_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    """x · sigmoid(y), for the halves of its input: linear in x."""
    value, gate = ctx.signal(a.self).labels.chunk(2, a.dim)
    ctx.classes.pin(gate, Break("the sigmoid of glu", function=True))
    ctx.pass_through(value, a)
    return ChannelSignal(value)


# -- Lipschitz constants ------------------------------------------------------------------------------------------------
def only(a: SimpleNamespace, node: torch.fx.Node) -> Sensitivity:
    """The first argument, which has to be the only one that depends on the model's input."""
    if not isinstance(a.args[0], Sensitivity) or any(isinstance(other, Sensitivity) for other in a.args[1:]):
        raise no_bound(node, f"{a.op} of two activations")
    return a.args[0]


@dataclass(frozen=True)
class Slope:
    """The largest slope of an elementwise function; those that are not round numbers are rounded up."""

    value: float

    def __call__(self, ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Sensitivity:
        """Lipschitz constant of an activation whose slope is at most `value`."""
        return ctx.apply(node, only(a, node), a.op, lambda: self.value, lambda t: self.value * t)


def _dropout_lipschitz(ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Sensitivity:
    if a.train and a.p > 0:
        raise no_bound(node, f"{a.op} that is active in evaluation mode")
    return Slope(1.0)(ctx, node, a)


def _leaky_relu_lipschitz(ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Sensitivity:
    below = a.negative_slope if a.op == "leaky_relu" else (float(a.lower) + float(a.upper)) / 2
    return Slope(max(1.0, abs(below)))(ctx, node, a)


def _elu_lipschitz(ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Sensitivity:
    return Slope(abs(a.scale) * max(1.0, abs(a.alpha * a.input_scale)))(ctx, node, a)


def _prelu_lipschitz(ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Sensitivity:
    return Slope(max(1.0, float(a.weight.abs().max())))(ctx, node, a)


# -- paths --------------------------------------------------------------------------------------------------------------
def unchanged(ctx: PathContext, node: torch.fx.Node, a: SimpleNamespace) -> ScaledCounts:
    """One edge per number."""
    return a.args[0]  # type: ignore[no-any-return]


# fmt: off
# -- rows: piecewise linear and positively homogeneous ------------------------------------------------------------------
add_row("relu", channels=homogeneous, conservation="channel", lipschitz=Slope(1.0), pieces=bends(AT_ZERO),
        paths=unchanged, activation=AT_ZERO)
add_row("leaky_relu", channels=homogeneous, conservation="channel", lipschitz=_leaky_relu_lipschitz,
        pieces=bends(AT_ZERO), paths=unchanged, activation=AT_ZERO)
add_row("abs", channels=homogeneous, conservation="channel", lipschitz=Slope(1.0),
        pieces=bends(AT_ZERO, unless=_complex), paths=unchanged, activation=AT_ZERO)
add_row("absolute", channels=homogeneous, conservation="channel", lipschitz=Slope(1.0), paths=unchanged,
        activation=AT_ZERO)
add_row("prelu", channels=_prelu_channels, conservation="channel", lipschitz=_prelu_lipschitz, paths=unchanged,
        activation=AT_ZERO)
add_row("_prelu_kernel", channels=_prelu_channels, conservation="channel", paths=unchanged,
        pieces=piecewise(lambda a, r: (a.self > 0,), fixed=("weight",)))
add_row("rrelu", channels=homogeneous, conservation="channel", lipschitz=_leaky_relu_lipschitz, activation=AT_ZERO)
add_row("rrelu_with_noise", channels=homogeneous, conservation="channel",
        pieces=piecewise(lambda a, r: (a.self > 0,), fixed=("noise",), unless=_draws))
add_row("neg", channels=_negative, conservation="matrix", lipschitz=Slope(1.0), pieces=LINEAR, paths=unchanged)

# -- rows: piecewise linear, with kinks elsewhere -----------------------------------------------------------------------
add_row("clamp", channels=_clamp_channels, conservation="channel", lipschitz=Slope(1.0),
        pieces=piecewise(_clamp_pattern), activation=RANGE)
add_row("clip", channels=_clamp_channels, conservation="channel", lipschitz=Slope(1.0), activation=RANGE)
add_row("clamp_min", channels=_clamp_channels, conservation="channel", lipschitz=Slope(1.0),
        pieces=piecewise(_clamp_pattern), activation=ActivationKinks(lambda min, **kwargs: (min,)))
add_row("clamp_max", channels=_clamp_channels, conservation="channel", lipschitz=Slope(1.0),
        pieces=piecewise(_clamp_pattern), activation=ActivationKinks(lambda max, **kwargs: (max,), lower=False))
HARDTANH = ActivationKinks(lambda min_val=-1.0, max_val=1.0, *args, **kwargs: (min_val, max_val))
add_row("hardtanh", channels=_clamp_channels, conservation="none", lipschitz=Slope(1.0), pieces=bends(HARDTANH),
        activation=HARDTANH)
add_row("relu6", conservation="none", lipschitz=Slope(1.0), activation=ActivationKinks(lambda *args, **kwargs: (0.0, 6.0)))
SIXTH = ActivationKinks(lambda *args, **kwargs: (-3.0, 3.0))
add_row("hardsigmoid", conservation="none", lipschitz=Slope(0.16666668), pieces=bends(SIXTH), activation=SIXTH)
add_row("hardswish", conservation="none", lipschitz=Slope(1.5), pieces=SMOOTH, activation=SIXTH)
THRESHOLD = ActivationKinks(lambda threshold, *args, **kwargs: (threshold,))
add_row("threshold", conservation="none", pieces=bends(THRESHOLD), activation=THRESHOLD)
add_row("hardshrink softshrink", conservation="none", pieces=bends(SHRINK), activation=SHRINK)

# -- rows: smooth activations -------------------------------------------------------------------------------------------
add_row("tanh", conservation="none", lipschitz=Slope(1.0), pieces=SMOOTH, activation=BENT)
add_row("sigmoid", conservation="none", lipschitz=Slope(0.25), pieces=SMOOTH, activation=BENT)
add_row("gelu", conservation="none", lipschitz=Slope(1.1291), pieces=SMOOTH, activation=BENT)
add_row("silu", conservation="none", lipschitz=Slope(1.0999), pieces=SMOOTH, activation=BENT)
add_row("mish", conservation="none", lipschitz=Slope(1.0886), pieces=SMOOTH, activation=BENT)
add_row("softplus log_sigmoid celu", conservation="none", lipschitz=Slope(1.0), pieces=SMOOTH, activation=BENT)
add_row("selu", conservation="none", lipschitz=Slope(1.7581), pieces=SMOOTH, activation=BENT)
add_row("elu", conservation="none", lipschitz=_elu_lipschitz, pieces=SMOOTH, activation=BENT)
add_row("log_sigmoid_forward", conservation="none", pieces=SMOOTH)
add_row("glu", channels=_glu_channels, conservation="none", pieces=SMOOTH)

# -- rows: dropout ------------------------------------------------------------------------------------------------------
add_row("dropout feature_dropout", channels=_dropout_channels, conservation="channel", lipschitz=_dropout_lipschitz,
        paths=unchanged)
add_row("native_dropout", channels=_dropout_channels, conservation="channel")
add_row("alpha_dropout feature_alpha_dropout", conservation="none", lipschitz=_dropout_lipschitz)

# -- rows: functions of mathematics -------------------------------------------------------------------------------------
add_row("sin cos atan", conservation="none", lipschitz=Slope(1.0), pieces=SMOOTH)
add_row("erf", conservation="none", lipschitz=Slope(2 / math.sqrt(math.pi)), pieces=SMOOTH)
add_row("exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal tan sinc asin acos sinh cosh asinh acosh atanh erfc "
        "erfinv lgamma digamma polygamma i0 logit", conservation="none", pieces=SMOOTH)
add_row("floor ceil round trunc", conservation="none", pieces=DISCRETE)
add_row("frac", conservation="none", pieces=piecewise(lambda a, r: (torch.trunc(a.self),)))
add_row("nan_to_num", pieces=LINEAR)
