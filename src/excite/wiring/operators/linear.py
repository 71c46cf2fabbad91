"""Linear layers, products of matrices, embeddings, Fourier transforms and linear algebra."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from excite.wiring.channels.labels import Break
from excite.wiring.channels.signals import ChannelContext, ChannelSignal, projected, view_shape
from excite.wiring.channels.slots import ParameterView, Slot, embedding_slot, linear_slot
from excite.wiring.operators.arithmetic import layer_label
from excite.wiring.operators.row import LINEAR, SMOOTH, add_row, product_of
from excite.wiring.propagation.counts import PathContext, ScaledCounts
from excite.wiring.propagation.operator_norms import matrix_norm
from excite.wiring.propagation.schema import first_shape, name_of, shapes_of
from excite.wiring.propagation.sensitivity import LipschitzContext, Sensitivity, no_bound

READ = "{} is read together with it"
_SUMMED = "{} is summed with it"


# -- layers with a weight -----------------------------------------------------------------------------------------------
def patterned(ctx: ChannelContext, labels: Tensor, shape: tuple[int, ...], axis: int) -> ChannelSignal:
    """Fresh channels along `axis` of an activation of this shape, with one random pattern for all of them."""
    axis = axis % len(shape)
    view = [1] * len(shape)
    view[axis] = shape[axis]
    pattern = ctx.random(*(1 if i == axis else size for i, size in enumerate(shape)))
    return ChannelSignal(labels.view(view).expand(shape), pattern.expand(shape))


def computed_weight(
    ctx: ChannelContext, node: torch.fx.Node, layer: str, a: SimpleNamespace, axis: int, out_axis: int
) -> ChannelSignal:
    """A layer whose weight is not a parameter but made of some, and scales with those: what it reads keeps its scale."""
    classes = ctx.classes
    classes.pin(ctx.signal(a.input).labels, Break(f"the weight of {layer}, which reads them, is computed"))
    weight = ctx.signal(a.weight).labels
    if getattr(a, "groups", 1) != 1 and out_axis != 0:
        return ctx.unknown(node, [a.weight, a.bias], a.op)  # type: ignore[no-any-return]
    out = classes.reduce(weight, [i for i in range(weight.dim()) if i != out_axis], READ).reshape(-1)
    ctx.add_bias(layer, a.bias, out)
    classes.not_mixable(out)
    shape = shapes_of(node)
    view = [1] * len(shape)
    view[axis] = shape[axis]
    return ChannelSignal(out.view(view).expand(shape))


def _linear_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    layer = ctx.layer(a.weight, node)
    if not isinstance(a.weight, ParameterView):
        return computed_weight(ctx, node, layer, a, -1, 0)
    x = ctx.signal(a.input)
    shape = shapes_of(node)
    inp = ctx.classes.reduce(x.labels, range(x.labels.dim() - 1), READ).reshape(-1)
    slot = linear_slot(a.weight, shape[-1], x.shape[-1])
    out = ctx.produce(layer, slot, inp, projected(ctx, x.prints, -1))
    ctx.add_bias(layer, a.bias, out)
    return patterned(ctx, out, shape, -1)


def check_constant_weight(node: torch.fx.Node, a: SimpleNamespace) -> None:
    """Refuses a layer whose weight or bias depends on the input."""
    if not isinstance(a.input, Sensitivity) or not isinstance(a.weight, Tensor) or isinstance(a.bias, Sensitivity):
        raise no_bound(node, "a layer whose weight depends on the input")


def _linear_lipschitz(ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    check_constant_weight(node, a)
    weight = a.weight.double()
    return ctx.apply(
        node, a.input, layer_label(node, a), lambda: matrix_norm(weight), lambda t: F.linear(t, weight.abs())
    )


def affine_paths(ctx: PathContext, node: torch.fx.Node, a: SimpleNamespace) -> ScaledCounts | None:
    """The same call, with weights of one: they are ones already, since all parameters are."""
    if not isinstance(a.weight, Tensor) or not isinstance(a.input, ScaledCounts):
        return None
    weight = torch.ones_like(a.weight, dtype=torch.float64)
    settings = a.args[3:] if a.op != "linear" else ()
    counts = a.input.through(lambda v: a.target(v, weight, None, *settings))
    return counts.plus_one() if ctx.biases and a.bias is not None else counts


def _embedding_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    if (
        not isinstance(a.weight, ParameterView) or a.scale_grad_by_freq
    ):  # that option changes gradients, and with them the law
        return ctx.unknown(node, [a.weight], a.op)
    shape = shapes_of(node)
    tokens = math.prod(a.weight.shape) // shape[-1]
    out = ctx.produce(a.weight.path.removesuffix(".weight"), embedding_slot(a.weight, tokens, shape[-1]), None, None)
    return patterned(ctx, out, shape, -1)


def _largest_embedding(a: SimpleNamespace) -> str | None:
    return "takes the largest of the embeddings" if a.mode == 2 else None


# -- products of matrices -----------------------------------------------------------------------------------------------
def _product_channels(ctx: ChannelContext, node: torch.fx.Node, x: Any, y: Any, equation: tuple[str, str, str]) -> Any:
    """A sum of products, as in einsum: with a parameter it is an affine layer, otherwise a product of activations."""
    a, b, c = equation
    if isinstance(x, ParameterView) and not isinstance(y, ParameterView):
        x, y, a, b = y, x, b, a
    if any(len(set(letters)) != len(letters) for letters in equation):
        return ctx.unknown(node, [x, y], "einsum")
    if isinstance(y, ParameterView) and not isinstance(x, ParameterView):
        return _weighted(ctx, node, ctx.signal(x), y, (a, b, c))
    first, other = ctx.signal(x), ctx.signal(y)
    if ctx.classes.all_fixed(first.labels) and not ctx.classes.all_fixed(other.labels):
        first, other, a, b = other, first, b, a
    if not ctx.classes.all_fixed(other.labels):
        result = _bilinear(ctx, node, (first, other), (a, b, c))
        return ctx.unknown(node, [first, other], "the product of two activations") if result is None else result
    if ctx.classes.all_fixed(first.labels):
        return ctx.unknown(node, [first, other], "the product of two activations")
    # Linear in `one`: elements that are summed scale together, the rest keep their labels.
    labels = ctx.classes.reduce(first.labels, [i for i, k in enumerate(a) if k not in c], _SUMMED)
    labels = _arranged(labels, a, c).expand(shapes_of(node))
    prints = None
    if first.prints is not None:
        prints = torch.einsum(f"{a},{b}->{c}", first.prints, ctx.prints_of(other))
    return ChannelSignal(labels, prints)


def _bilinear(
    ctx: ChannelContext,
    node: torch.fx.Node,
    factors: tuple[ChannelSignal, ChannelSignal],
    equation: tuple[str, str, str],
) -> ChannelSignal | None:
    """Inner products of two activations, as of queries with keys: the products of all pairs of channels scale together.

    Where the result keeps its scale, as in front of a softmax, the channels of one factor scale inversely to those of the other.
    """
    a, b, c = equation
    summed = [k for k in a if k in b and k not in c]
    lead = [k for k in c if k in a and k in b]
    free = [k for k in (*a, *b) if (k in a) != (k in b)]
    if len(summed) != 1 or any(k not in c for k in free):
        return None
    name = "attention" if _softmax_follows(node) else "a product"
    labels, heads = [], None
    for signal, letters in zip(factors, (a, b)):
        order = [letters.index(k) for k in (*lead, *summed, *(k for k in letters if k in free))]
        remaining = range(len(lead) + 1, len(order))
        reduced = ctx.classes.reduce(signal.labels.permute(order), remaining, _SUMMED).flatten(len(lead))
        ctx.classes.pass_through(reduced, name, linear=signal.prints is not None)
        if signal.prints is not None:
            heads = (
                ctx.random(*reduced.shape[:-1], 1) if heads is None else heads
            )  # distinguishes one head from another
            rows = (
                signal.prints.permute(order).flatten(len(lead) + 1)
                if len(order) > len(reduced.shape)
                else signal.prints.permute(order)[..., None]
            )
            rows = (rows * heads[..., None]).reshape(reduced.numel(), -1)
            ctx.more_prints.append((reduced.reshape(-1), rows @ ctx.random(rows.shape[1], 2)))
        labels.append(reduced)
    product = ctx.relations.product(labels, Break("the product of two activations", function=True))
    total = ctx.classes.reduce(product, [-1], _SUMMED)[..., 0]
    ctx.bilinear.append((labels[0], labels[1], total))
    expanded = total.reshape(
        *(total.shape[lead.index(k)] if k in lead else 1 for k in [*lead, *(k for k in c if k in free)])
    )
    expanded = expanded.permute([[*lead, *(k for k in c if k in free)].index(k) for k in c])
    return ChannelSignal(expanded.expand(shapes_of(node)))


def _softmax_follows(node: torch.fx.Node, max_nodes: int = 8) -> bool:
    """Whether a softmax follows within a few calls, as for the logits of attention."""
    nodes = [node]
    for _ in range(max_nodes):
        nodes = [user for node in nodes for user in node.users]
        if any("softmax" in name_of(node.target) for node in nodes if node.op == "call_function"):
            return True
    return False


def _arranged(tensor: Tensor, letters: str, target: str) -> Tensor:
    """Axes named by `letters` in the order of `target`; new axes have size one, axes of size one may vanish."""
    for i in reversed(range(len(letters))):
        if letters[i] not in target:
            tensor = tensor.squeeze(i)
    retained = [k for k in letters if k in target]
    tensor = tensor.permute([retained.index(k) for k in target if k in retained])
    for i, k in enumerate(target):
        if k not in retained:
            tensor = tensor.unsqueeze(i)
    return tensor


def _weighted(
    ctx: ChannelContext, node: torch.fx.Node, x: ChannelSignal, view: ParameterView, equation: tuple[str, str, str]
) -> Any:
    a, b, c = equation
    shape = shapes_of(node)
    shared = [k for k in b if k in a and k in c]  # blocks
    made = [k for k in b if k not in a]  # outputs
    read = [k for k in b if k in a and k not in c]  # inputs
    sizes = dict(zip(a, x.shape)) | dict(zip(c, shape))
    if any(k not in c for k in made) or any(k not in b and k not in c for k in a):
        return ctx.unknown(node, [x, view], "einsum")
    order = tuple(b.index(k) for k in [*shared, *made, *read])
    counts = [math.prod(sizes[k] for k in keys) for keys in (shared, made, read)]
    plain = len(b) == 2 and not view.steps and not shared and len(made) == 1
    axes = (b.index(made[0]), b.index(read[0])) if plain and len(read) == 1 else (None, None)
    slot = Slot(view, (counts[0], counts[1], counts[2], 1), order=order, axes=axes)
    keys = "".join([*shared, *read])
    inp = ctx.classes.reduce(x.labels, [i for i, k in enumerate(a) if k not in keys], _SUMMED)
    inp = _arranged(inp, a, keys).reshape(-1)
    prints = None
    if x.prints is not None:
        prints = projected(ctx, x.prints.permute([*map(a.index, keys), *(i for i, k in enumerate(a) if k not in keys)])
                            .reshape(inp.numel(), -1), 0)  # fmt: skip
    layer = ctx.layer(view, node)
    out = ctx.produce(layer, slot, inp, prints)
    expanded = out.view([sizes[k] for k in [*shared, *made]])
    labels = _arranged(expanded, "".join([*shared, *made]), c).expand(shape)
    pattern = ctx.random(*(1 if k in made else sizes[k] for k in c))
    return ChannelSignal(labels, pattern.expand(shape))


def matmul_letters(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[str, str, str]:
    """matmul as an equation; batch axes of size one on one side are left to the caller to squeeze."""
    batch = "abcdefgh"[: max(len(x), len(y)) - 2] if max(len(x), len(y)) > 2 else ""
    first = (batch[len(batch) - (len(x) - 2) :] if len(x) > 2 else "") + ("mk" if len(x) > 1 else "k")
    second = (batch[len(batch) - (len(y) - 2) :] if len(y) > 2 else "") + ("kn" if len(y) > 1 else "k")
    return first, second, batch + ("m" if len(x) > 1 else "") + ("n" if len(y) > 1 else "")


def _matmul_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    x, y = a.args[:2]
    equation = matmul_letters(view_shape(x), view_shape(y))
    sizes: dict[str, set[int]] = {}
    for letters, value in zip(equation, (x, y)):
        for k, size in zip(letters, view_shape(value)):
            sizes.setdefault(k, set()).add(size)
    broadcast = [k for k, size in sizes.items() if len(size) > 1]  # batch axes of size one on one side
    if broadcast and isinstance(y, ParameterView):
        left, right, made = equation
        axes = [left.index(k) for k in broadcast]
        if isinstance(x, ParameterView) or any(x.shape[axis] > 1 for axis in axes):
            return ctx.unknown(node, [x, y], "matmul with broadcasting")
        x, equation = x.map(lambda t: t.squeeze(axes)), ("".join(k for k in left if k not in broadcast), right, made)
    elif broadcast and isinstance(x, ParameterView):
        return ctx.unknown(node, [x, y], "matmul with broadcasting")
    elif broadcast:
        x, y = (_expanded(ctx.signal(value), letters, sizes) for value, letters in zip((x, y), equation))
    return _product_channels(ctx, node, x, y, equation)


def _expanded(x: ChannelSignal, letters: str, sizes: Mapping[str, set[int]]) -> ChannelSignal:
    shape = tuple(max(sizes[k]) for k in letters)
    return x.map(lambda t: t.expand(shape))


def _addmm_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    x, y = a.args[1:3]
    result = _product_channels(ctx, node, x, y, matmul_letters(view_shape(x), view_shape(y)))
    if a.beta == 0:
        return result
    bias = ctx.signal(a.self, ctx.uses[-1].layer if ctx.uses else None)
    return ChannelSignal(ctx.classes.unite(result.labels, bias.labels, "{} is added"), result.prints)


def _einsum_channels(ctx: ChannelContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    equation = a.equation.replace(" ", "")
    if len(a.tensors) != 2 or "." in equation or "->" not in equation:
        return ctx.unknown(node, list(a.tensors), a.op)
    left, right = equation.split("->")
    first, second = left.split(",")
    return _product_channels(ctx, node, a.tensors[0], a.tensors[1], (first, second, right))


def _matmul_lipschitz(ctx: LipschitzContext, node: torch.fx.Node, a: SimpleNamespace) -> Any:
    x, y = a.args[1:3] if a.op == "addmm" else a.args[:2]
    moving, weight = (x, y) if isinstance(x, Sensitivity) else (y, x)
    if not isinstance(weight, Tensor) or (a.op == "addmm" and (isinstance(a.self, Sensitivity) or abs(a.alpha) != 1)):
        raise no_bound(node, "the product of two activations")
    # A matrix that is repeated over the batch is fine; an activation that is repeated over matrices is not covered.
    shape = moving.shape
    if min(len(shape), weight.dim()) < 2 or (*shape[:-2], 0) != (*first_shape(node)[:-2], 0):
        raise no_bound(node, f"{a.op} of tensors of these shapes")
    weight = weight.double()
    return ctx.apply(
        node,
        moving,
        layer_label(node, a),
        lambda: matrix_norm(weight),
        lambda t: t @ weight.abs() if moving is x else weight.abs() @ t,
    )


def _matmul_paths(ctx: PathContext, node: torch.fx.Node, a: SimpleNamespace) -> ScaledCounts | None:
    if sum(isinstance(value, ScaledCounts) for value in a.args) != 1:
        return None
    left, right = (a.args[1], a.args[2]) if a.op == "addmm" else (a.args[0], a.args[1])
    if isinstance(left, ScaledCounts):
        counts = left.through(lambda v: v @ torch.ones_like(right, dtype=torch.float64))
    else:
        counts = right.through(lambda v: torch.ones_like(left, dtype=torch.float64) @ v)
    return counts.plus_one() if a.op == "addmm" and ctx.biases else counts


# fmt: off
# -- rows ---------------------------------------------------------------------------------------------------------------
add_row("linear", channels=_linear_channels, conservation="matrix", lipschitz=_linear_lipschitz,
        pieces=product_of("input", "weight"), paths=affine_paths)
add_row("mm", channels=_matmul_channels, conservation="matrix", lipschitz=_matmul_lipschitz,
        pieces=product_of("self", "mat2"), paths=_matmul_paths)
add_row("bmm", channels=_matmul_channels, conservation="matrix", lipschitz=_matmul_lipschitz,
        pieces=product_of("self", "mat2"))
add_row("matmul", channels=_matmul_channels, conservation="matrix", lipschitz=_matmul_lipschitz, paths=_matmul_paths)
add_row("mv", channels=_matmul_channels, conservation="matrix", pieces=product_of("self", "vec"))
add_row("addmm", channels=_addmm_channels, conservation="matrix", lipschitz=_matmul_lipschitz,
        pieces=product_of("mat1", "mat2"), paths=_matmul_paths)
add_row("baddbmm", channels=_addmm_channels, conservation="matrix", pieces=product_of("batch1", "batch2"))
add_row("einsum", channels=_einsum_channels, conservation="matrix")
add_row("addmv", conservation="matrix", pieces=product_of("mat", "vec"))
add_row("addr", conservation="matrix", pieces=product_of("vec1", "vec2"))
add_row("_trilinear", conservation="matrix", pieces=product_of("i1", "i2", "i3"))
add_row("embedding", channels=_embedding_channels, conservation="matrix", pieces=LINEAR)
add_row("_embedding_bag_forward_only _embedding_bag", conservation="matrix",
        pieces=product_of("weight", "per_sample_weights", unless=_largest_embedding))
add_row("_fft_r2c _fft_c2r _fft_c2c", conservation="matrix", pieces=LINEAR)
add_row("linalg_inv_ex _linalg_det _linalg_solve_ex linalg_qr _linalg_svd _linalg_eigh linalg_cholesky_ex", pieces=SMOOTH)
