"""Normalizations: what they read may scale as a whole, and their affine pair makes new channels."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from excite.wiring.channels.labels import Break
from excite.wiring.channels.signals import Bench, NormRead, Signal, held_shape, module_of
from excite.wiring.channels.slots import Held, Slot
from excite.wiring.propagation.schema import rule


@rule("batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm", "_native_batch_norm_legit",
      "native_batch_norm", "native_layer_norm", "native_group_norm", "cudnn_batch_norm")  # fmt: skip
def normalization(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    if a.op.startswith(("native", "_native", "cudnn")):
        return bench.unknown(node, [v for v in a.args if isinstance(v, Signal | Held)], a.op)
    x = bench.signal(a.input)
    name = module_of(node) or a.op
    last = len(a.normalized_shape) if a.op in ("layer_norm", "rms_norm") else 0
    _normalize(bench, x, a, name, last)
    if not isinstance(a.weight, Held):
        source = bench.constant(x.shape, f"the output of {name}")
        if a.weight is not None:
            bench.classes.pin(bench.signal(a.weight).labels, Break(f"the weight of {name} is computed"))
        return source
    shift = getattr(a, "bias", None)
    scale = bench.signal(a.weight, name).labels
    if shift is not None:
        bench.classes.unite(scale, bench.signal(shift, name).labels, "{} is added as a bias")
    bench.classes.not_mixable(scale)
    shape = tuple(scale.shape) if last else (-1, *[1] * (x.labels.dim() - 2))
    return Signal(scale.reshape(shape).expand(x.shape))


def _normalize(bench: Bench, x: Signal, a: SimpleNamespace, name: str, last: int) -> None:
    """Numbers that are normalized together scale together; the result does not see by how much."""
    classes = bench.classes
    frozen = not (a.training if a.op == "batch_norm" else a.use_input_stats if a.op == "instance_norm" else True)
    if frozen and bench.training:
        classes.pin(x.labels, Break(f"{name} shifts by frozen statistics"))
        return
    what = "{} is normalized with it by " + name
    if last:
        labels = classes.reduce(x.labels, range(-last, 0), what)
        bench.norm_reads.append(NormRead(name, a.op, labels.reshape(-1, 1)))
    else:
        spatial = range(2, x.labels.dim())
        labels = classes.reduce(x.labels, spatial if a.op == "instance_norm" else [0, *spatial], what)
        if a.op == "group_norm":
            rows = labels.reshape(labels.shape[0], a.num_groups, -1)
            labels = classes.reduce(rows, [0, 2], what)
        bench.norm_reads.append(NormRead(name, a.op, labels.reshape(labels.shape[0], -1)))
    for label in classes.channels(labels):
        state = classes.state(label)
        state.norms.setdefault(name)
        state.nonlinear = True


@rule("_weight_norm")
def weight_norm(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    """g v / |v|: each slice of the direction v may scale as a whole, and g makes the rows of the weight."""
    shape = held_shape(a.v)
    if not isinstance(a.v, Held):
        return bench.unknown(node, [a.v, a.g], "weight_norm")
    order = (a.dim, *(i for i in range(len(shape)) if i != a.dim))
    slot = Slot(a.v, (1, shape[a.dim], 1, math.prod(shape) // shape[a.dim]), order=order)
    for label in bench.produce(a.v.path, slot, None, None).tolist():
        bench.classes.state(label).norms.setdefault("weight_norm")
        bench.classes.state(label).nonlinear = True
    length = bench.signal(a.g)
    bench.classes.not_mixable(length.labels)
    return Signal(length.labels.expand(shape))
