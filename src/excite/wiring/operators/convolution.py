"""Layers that make channels out of channels: linear maps, convolutions, embeddings."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from excite.wiring.channels.labels import Break
from excite.wiring.channels.signals import Bench, Signal, held_shape, projected, shapes_of
from excite.wiring.channels.slots import Held, conv_slot, embedding_slot, linear_slot
from excite.wiring.propagation.schema import rule

_READ = "{} is read together with it"


def _patterned(bench: Bench, labels: Tensor, shape: tuple[int, ...], axis: int) -> Signal:
    """Fresh channels along `axis` of an activation of this shape, with one random pattern for all of them."""
    axis = axis % len(shape)
    view = [1] * len(shape)
    view[axis] = shape[axis]
    pattern = bench.random(*(1 if i == axis else size for i, size in enumerate(shape)))
    return Signal(labels.view(view).expand(shape), pattern.expand(shape))


def _computed(bench: Bench, node: torch.fx.Node, layer: str, a: SimpleNamespace, axis: int, out_axis: int) -> Signal:
    """A layer whose weight is not a parameter but made of some, and scales with those: what it reads keeps its scale."""
    classes = bench.classes
    classes.pin(bench.signal(a.input).labels, Break(f"the weight of {layer}, which reads them, is computed"))
    weight = bench.signal(a.weight).labels
    if getattr(a, "groups", 1) != 1 and out_axis != 0:
        return bench.unknown(node, [a.weight, a.bias], a.op)  # type: ignore[no-any-return]
    out = classes.reduce(weight, [i for i in range(weight.dim()) if i != out_axis], _READ).reshape(-1)
    bench.add_bias(layer, a.bias, out)
    classes.not_mixable(out)
    shape = shapes_of(node)
    view = [1] * len(shape)
    view[axis] = shape[axis]
    return Signal(out.view(view).expand(shape))


@rule("linear")
def linear(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    layer = bench.layer(a.weight, node)
    if not isinstance(a.weight, Held):
        return _computed(bench, node, layer, a, -1, 0)
    x = bench.signal(a.input)
    shape = shapes_of(node)
    inp = bench.classes.reduce(x.labels, range(x.labels.dim() - 1), _READ).reshape(-1)
    slot = linear_slot(a.weight, shape[-1], x.shape[-1])
    out = bench.produce(layer, slot, inp, projected(bench, x.prints, -1))
    bench.add_bias(layer, a.bias, out)
    return _patterned(bench, out, shape, -1)


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
def convolution(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    layer = bench.layer(a.weight, node)
    x = bench.signal(a.input)
    weight = held_shape(a.weight)
    axis = x.labels.dim() - (len(weight) - 1)  # an input without a batch axis is allowed
    transposed = a.transposed if a.op == "convolution" else "transpose" in a.op
    if not isinstance(a.weight, Held):
        return _computed(bench, node, layer, a, axis, 1 if transposed else 0)
    others = [i for i in range(x.labels.dim()) if i != axis]
    inp = bench.classes.reduce(x.labels, others, _READ).reshape(-1)
    slot = conv_slot(a.weight, weight, a.groups, transposed)
    out = bench.produce(layer, slot, inp, projected(bench, x.prints, axis))
    bench.add_bias(layer, a.bias, out)
    return _patterned(bench, out, shapes_of(node), axis)


@rule("embedding")
def embedding(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    if not isinstance(a.weight, Held) or a.scale_grad_by_freq:  # that option changes gradients, and with them the law
        return bench.unknown(node, [a.weight], a.op)
    shape = shapes_of(node)
    words = math.prod(a.weight.shape) // shape[-1]
    out = bench.produce(a.weight.path.removesuffix(".weight"), embedding_slot(a.weight, words, shape[-1]), None, None)
    return _patterned(bench, out, shape, -1)
