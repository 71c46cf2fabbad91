"""Sums of products of tensors: with a parameter they are affine layers, otherwise one factor at most may scale."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from excite.wiring.channels.labels import Break
from excite.wiring.channels.signals import Bench, Signal, held_shape, projected, shapes_of
from excite.wiring.channels.slots import Held, Slot
from excite.wiring.propagation.schema import rule

_READ = "{} is summed with it"


def product(bench: Bench, node: torch.fx.Node, x: Any, y: Any, equation: tuple[str, str, str]) -> Any:
    """A sum of products, as in einsum: with a parameter it is an affine layer, otherwise a product of activations."""
    a, b, c = equation
    if isinstance(x, Held) and not isinstance(y, Held):
        x, y, a, b = y, x, b, a
    if any(len(set(letters)) != len(letters) for letters in equation):
        return bench.unknown(node, [x, y], "einsum")
    if isinstance(y, Held) and not isinstance(x, Held):
        return _weighted(bench, node, bench.signal(x), y, (a, b, c))
    one, other = bench.signal(x), bench.signal(y)
    if bench.classes.all_fixed(one.labels) and not bench.classes.all_fixed(other.labels):
        one, other, a, b = other, one, b, a
    if not bench.classes.all_fixed(other.labels) or bench.classes.all_fixed(one.labels):
        return bench.unknown(node, [one, other], "the product of two activations")
    # Linear in `one`: elements that are summed scale together, the rest keep their labels.
    labels = bench.classes.reduce(one.labels, [i for i, k in enumerate(a) if k not in c], _READ)
    labels = _arranged(labels, a, c).expand(shapes_of(node))
    prints = None
    if one.prints is not None:
        prints = torch.einsum(f"{a},{b}->{c}", one.prints, bench.prints_of(other))
    return Signal(labels, prints)


def _arranged(tensor: Tensor, letters: str, target: str) -> Tensor:
    """Axes named by `letters` in the order of `target`; new axes have size one, axes of size one may vanish."""
    for i in reversed(range(len(letters))):
        if letters[i] not in target:
            tensor = tensor.squeeze(i)
    kept = [k for k in letters if k in target]
    tensor = tensor.permute([kept.index(k) for k in target if k in kept])
    for i, k in enumerate(target):
        if k not in kept:
            tensor = tensor.unsqueeze(i)
    return tensor


def _weighted(bench: Bench, node: torch.fx.Node, x: Signal, held: Held, equation: tuple[str, str, str]) -> Any:
    a, b, c = equation
    shape = shapes_of(node)
    shared = [k for k in b if k in a and k in c]  # blocks
    made = [k for k in b if k not in a]  # outputs
    read = [k for k in b if k in a and k not in c]  # inputs
    sizes = dict(zip(a, x.shape)) | dict(zip(c, shape))
    if any(k not in c for k in made) or any(k not in b and k not in c for k in a):
        return bench.unknown(node, [x, held], "einsum")
    order = tuple(b.index(k) for k in [*shared, *made, *read])
    counts = [math.prod(sizes[k] for k in keys) for keys in (shared, made, read)]
    plain = len(b) == 2 and not held.steps and not shared and len(made) == 1
    axes = (b.index(made[0]), b.index(read[0])) if plain and len(read) == 1 else (None, None)
    slot = Slot(held, (counts[0], counts[1], counts[2], 1), order=order, axes=axes)
    keys = "".join([*shared, *read])
    inp = bench.classes.reduce(x.labels, [i for i, k in enumerate(a) if k not in keys], _READ)
    inp = _arranged(inp, a, keys).reshape(-1)
    prints = None
    if x.prints is not None:
        prints = projected(bench, x.prints.permute([*map(a.index, keys), *(i for i, k in enumerate(a) if k not in keys)])
                            .reshape(inp.numel(), -1), 0)  # fmt: skip
    layer = bench.layer(held, node)
    out = bench.produce(layer, slot, inp, prints)
    spread = out.view([sizes[k] for k in [*shared, *made]])
    labels = _arranged(spread, "".join([*shared, *made]), c).expand(shape)
    pattern = bench.random(*(1 if k in made else sizes[k] for k in c))
    return Signal(labels, pattern.expand(shape))


def _matmul_letters(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[str, str, str]:
    """matmul as an equation; batch axes of size one on one side are left to the caller to squeeze."""
    batch = "abcdefgh"[: max(len(x), len(y)) - 2] if max(len(x), len(y)) > 2 else ""
    first = (batch[len(batch) - (len(x) - 2) :] if len(x) > 2 else "") + ("mk" if len(x) > 1 else "k")
    second = (batch[len(batch) - (len(y) - 2) :] if len(y) > 2 else "") + ("kn" if len(y) > 1 else "k")
    return first, second, batch + ("m" if len(x) > 1 else "") + ("n" if len(y) > 1 else "")


@rule("matmul", "mm", "bmm", "mv")
def matmul(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    x, y = a.args[:2]
    equation = _matmul_letters(held_shape(x), held_shape(y))
    sizes: dict[str, set[int]] = {}
    for letters, value in zip(equation, (x, y)):
        for k, size in zip(letters, held_shape(value)):
            sizes.setdefault(k, set()).add(size)
    if any(len(found) > 1 for found in sizes.values()):  # a batch axis of size one is broadcast
        return bench.unknown(node, [x, y], "matmul with broadcasting")
    return product(bench, node, x, y, equation)


@rule("addmm", "baddbmm")
def addmm(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    x, y = a.args[1:3]
    result = product(bench, node, x, y, _matmul_letters(held_shape(x), held_shape(y)))
    if a.beta == 0:
        return result
    bias = bench.signal(a.self, bench.uses[-1].layer if bench.uses else None)
    return Signal(bench.classes.unite(result.labels, bias.labels, "{} is added"), result.prints)


@rule("einsum")
def einsum(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    equation = a.equation.replace(" ", "")
    if len(a.tensors) != 2 or "." in equation or "->" not in equation:
        return bench.unknown(node, list(a.tensors), a.op)
    left, right = equation.split("->")
    first, second = left.split(",")
    return product(bench, node, a.tensors[0], a.tensors[1], (first, second, right))


@rule("scaled_dot_product_attention")
def attention(bench: Bench, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    """softmax(QK') V. Channels of Q may scale if those of K do so inversely; V passes, mixed over positions by the same
    map for all channels of a head."""
    classes = bench.classes
    query, key, value = (bench.signal(part) for part in (a.query, a.key, a.value))
    shape = shapes_of(node)
    if a.attn_mask is not None:
        classes.pin(bench.signal(a.attn_mask).labels, Break(a.op, function=True))
    if a.enable_gqa or not query.labels.dim() == key.labels.dim() == value.labels.dim() == len(shape):
        return bench.unknown(node, [query, key, value], a.op)
    heads = bench.random(*shape[:-2], 1, 1)  # tells the channels of one head from those of another
    axes = [0, -2] if len(shape) > 2 else [-2]
    reduced = []
    for part in (query, key):
        labels = classes.reduce(part.labels, axes, _READ)
        classes.pass_through(labels, a.op, linear=part.prints is not None)
        if part.prints is not None:
            rows = (part.prints * heads).movedim((0, -2), (-2, -1)) if len(shape) > 2 else part.prints.T
            rows = rows.reshape(labels.numel(), -1)
            bench.looks.append((labels.reshape(-1), rows @ bench.random(rows.shape[1], 2)))
        reduced.append(labels)
    bench.relations.invert(reduced[0], reduced[1], Break(a.op, function=True))
    labels = classes.reduce(value.labels, [-2], _READ)
    classes.pass_through(labels, a.op, linear=True)
    prints = None
    if value.prints is not None:
        prints = bench.random(*shape[:-1], value.shape[-2]) @ value.prints
    return Signal(labels.expand(shape), prints)
