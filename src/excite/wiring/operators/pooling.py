"""Pooling, resampling and reductions: every output is made of elements that must scale together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from excite.wiring.channels.signals import Bench, Signal, fill, shapes_of
from excite.wiring.channels.slots import Held
from excite.wiring.propagation.schema import rule

_MIXED = "{} is mixed in by "
_MAX = ("max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices", "max_pool2d_with_indices",
        "max_pool3d_with_indices", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")  # fmt: skip
AVERAGE = ("avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
            "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d")  # fmt: skip
_RESIZE = ("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact2d",
           "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d")  # fmt: skip


def _spatial(name: str) -> int:
    return next(n for n in (1, 2, 3) if f"{n}d" in name)


@rule(*_MAX)
def max_pool(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value = bench.signal(a.args[0])
    axes = range(-_spatial(a.op), 0)
    labels = bench.classes.reduce(value.labels, axes, _MIXED + a.op)
    bench.classes.pass_through(labels, a.op, linear=False)
    shapes = shapes_of(node)
    if isinstance(shapes, list):
        return Signal(labels.expand(shapes[0])), bench.constant(shapes[1])
    return Signal(labels.expand(shapes))


@rule(*AVERAGE, *_RESIZE)
def average(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value = bench.signal(a.args[0])
    labels = bench.classes.reduce(value.labels, range(-_spatial(a.op), 0), _MIXED + a.op)
    bench.classes.pass_through(labels, a.op, linear=True)
    prints = None if value.prints is None else a.target(value.prints.contiguous(), *a.args[1:], **a.kwargs)
    return Signal(labels.expand(shapes_of(node)), prints)


def _reduced(bench: Bench, value: Signal, a: SimpleNamespace) -> Tensor:
    dims = getattr(a, "dim", None)
    axes = range(value.labels.dim()) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    labels = bench.classes.reduce(value.labels, axes, _MIXED + a.op)
    if not getattr(a, "keepdim", False):
        for axis in sorted({axis % max(value.labels.dim(), 1) for axis in axes}, reverse=True):
            labels = labels.squeeze(axis) if labels.dim() else labels
    return labels


@rule("mean", "sum")
def linear_reduction(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value = bench.signal(a.args[0])
    labels = _reduced(bench, value, a)
    bench.classes.pass_through(labels, a.op, linear=True)
    prints = None
    if value.prints is not None:
        prints = a.target(value.prints, *a.args[1:], **{k: v for k, v in a.kwargs.items() if k != "dtype"})
    return Signal(labels, prints)


@rule("amax", "amin", "max", "min", "linalg_vector_norm", "norm")
def homogeneous_reduction(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    if getattr(a, "other", None) is not None or 0 in (getattr(a, "ord", 2), getattr(a, "p", 2)):
        return bench.unknown(node, [v for v in a.args if isinstance(v, Signal | Held)], a.op)
    value = bench.signal(a.args[0])
    labels = _reduced(bench, value, a)
    bench.classes.pass_through(labels, a.op, linear=False)
    shapes = shapes_of(node)
    if isinstance(shapes, list):
        return Signal(labels), bench.constant(shapes[1])
    return Signal(labels)


@rule("cumsum")
def running_sum(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value = bench.signal(a.args[0])
    labels = bench.classes.reduce(value.labels, [a.dim], _MIXED + a.op)
    prints = None if value.prints is None else value.prints.cumsum(a.dim)
    return Signal(labels.expand(value.shape), prints)


@rule("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax")
def softmax(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    value = bench.signal(a.args[0])
    result = bench.unknown(node, [value], a.op.strip("_"))
    labels = bench.classes.reduce(value.labels, [a.dim], _MIXED + a.op)
    return fill(shapes_of(node), lambda shape: Signal(labels.expand(shape))) or result
