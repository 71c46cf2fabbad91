"""One attention of a model: which rows of which weights make its queries, keys and values, and which columns read it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from excite.wiring.channels.slots import Slot, Use
from excite.wiring.propagation.schema import module_of
from excite.wiring.roles.provenance import Origin, Provenance, TracedAttention


@dataclass(frozen=True)
class Projection:
    """The part of one weight that makes the queries, keys or values of an attention, or reads its heads.

    Attributes:
        layer: Name of the affine layer, as in `Wiring.layers`.
        parameter: Path of its weight; for a fused projection (GPT-2's `c_attn`, `in_proj_weight`) query, key and value
            have the same one.
        index: By head, the numbers of its channels among the output channels of the call (of its part of the weight,
            where the weight is chunked before the call); for the output projection, among its input channels. One tuple per
            key head for keys and values of grouped attention.
        bias: Path of the bias that is added to these channels; None if there is none, and for the output projection.
        norm: Path of the normalization between the projection and the product (QK-norm), or None.
        slot: The layout of the weight, for `heads`.

    Example:
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> (attention,) = excite.trace(model, torch.zeros(2, 3, 8)).attentions
        >>> attention.key.parameter, attention.key.index[1]
        ('self_attn.in_proj_weight', (12, 13, 14, 15))
        >>> attention.key.heads(model.self_attn.in_proj_weight).shape
        torch.Size([2, 4, 8])
    """

    layer: str
    parameter: str
    index: tuple[tuple[int, ...], ...]
    bias: str | None = None
    norm: str | None = None
    slot: Slot = field(repr=False, compare=False, kw_only=True)
    reads: bool = field(default=False, repr=False, kw_only=True)

    def heads(self, tensor: Tensor) -> Tensor:
        """Returns the part of the weight that belongs to each head.

        Args:
            tensor: The weight, its gradient, or anything of its shape.

        Returns:
            Tensor (heads, channels per head, features): for queries, keys and values, row (h, i) maps the input to
            channel i of head h; for the output, it is the column that channel i of head h is multiplied by. So
            q.heads(W_q)[h].T @ k.heads(W_k)[g] is the bilinear form of the logits of head h with key head g, but for
            biases, norms and rotations between.
        """
        rows = self.slot.in_rows(tensor) if self.reads else self.slot.out_rows(tensor)
        return rows[torch.tensor(self.index, device=tensor.device)]


@dataclass(frozen=True)
class Attention:
    """One call of attention, softmax(QK') V.

    Attributes:
        number: 0 for the first attention that the model runs, 1 for the second, …
        module: Path of the module that makes the call.
        layer: The number of the block it is in; `number` if the module's path has none.
        name: "layer 3"; with the part of the model, or the name of the module, where that is not unique.
        kernel: "scaled_dot_product_attention", or "softmax" where it is written out.
        heads: Number of query heads.
        key_heads: Number of key and value heads: `heads`, fewer for grouped attention, 1 for multi-query attention.
        groups: By query head, the number of its key head.
        query: Where the queries come from; None if it cannot be determined (a weight that is computed on the fly).
        key: Where the keys come from, likewise.
        value: Where the values come from, likewise.
        output: The projection that reads the heads, likewise.
        cross: Whether keys are made from another signal than queries (cross-attention).

    Example:
        >>> model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> (attention,) = excite.trace(model, torch.zeros(2, 3, 8)).attentions
        >>> attention.module, attention.heads, attention.output.parameter
        ('self_attn', 2, 'self_attn.out_proj.weight')
    """

    number: int
    module: str
    layer: int
    name: str
    kernel: str
    heads: int
    key_heads: int
    groups: tuple[int, ...]
    query: Projection | None
    key: Projection | None
    value: Projection | None
    output: Projection | None
    cross: bool = False


def find_attentions(provenance: Provenance) -> tuple[Attention, ...]:
    """Returns the attentions of a model in order of execution.

    Args:
        provenance: Where the numbers of the model's graph come from (`follow_origins`).
    """
    attentions = []
    blocks = block_paths(module_of(attention.node) for attention in provenance.attentions)
    for number, attention in enumerate(provenance.attentions):
        module = module_of(attention.node)
        query, key, value = (_made(provenance, origin) for origin in (attention.query, attention.key, attention.value))
        reads = [_input_of(provenance, origin) for origin in (attention.query, attention.key)]
        attentions.append(
            Attention(
                number,
                module,
                block_number(blocks[module], number),
                "",
                attention.kernel,
                attention.heads,
                max(attention.groups) + 1,
                tuple(attention.groups),
                query,
                key,
                value,
                _reader(provenance, attention),
                cross=None not in reads and not torch.equal(*reads),  # type: ignore[arg-type]
            )
        )
    return _named(attentions)


def block_paths(modules: Iterable[str]) -> dict[str, str]:
    """The block of each attention, by the path of its module: up to the first number in which it differs from another one.

    So `encoder.block.1.layer.0.SelfAttention` is in `encoder.block.1`, and `blocks.2.heads.0` in `blocks.2`. Where no number differs, up to the
    last one.
    """
    names = {module: module.split(".") for module in modules}
    result = {}
    for module, path in names.items():
        numbers = [i for i, name in enumerate(path) if name.isdecimal()]
        others = [other for other in names.values() if other is not path]
        differs = (
            i
            for i in numbers
            if any(
                other[:i] == path[:i] and "".join(other[i : i + 1]).isdecimal() and other[i] != path[i]
                for other in others
            )
        )
        first = next(differs, None)
        result[module] = block_of(module) if first is None else ".".join(path[: first + 1])
    return result


def block_of(path: str) -> str:
    """The path up to its last number, such as model.layers.3; empty if it has none."""
    names = path.split(".")
    last = max((i for i, name in enumerate(names) if name.isdecimal()), default=-1)
    return ".".join(names[: last + 1])


def block_number(path: str, default: int) -> int:
    """The last number in a path."""
    block = block_of(path)
    return int(block.rpartition(".")[2]) if block else default


def _named(attentions: Sequence[Attention]) -> tuple[Attention, ...]:
    """Attentions named by their layer; by the part of the model and by their module where that is not unique."""
    result = []
    blocks = block_paths(attention.module for attention in attentions)
    for attention in attentions:
        block = blocks[attention.module]
        same = [other for other in attentions if other.layer == attention.layer and other is not attention]
        name = f"layer {attention.layer}"
        if any(blocks[other.module] != block for other in same):
            paths = [blocks[other.module].split(".") for other in same] + [block.split(".")]
            own = [token for token in paths[-1] if not all(token in path for path in paths)]
            name = f"{own[0]} {name}" if own else f"{block} {name}".strip()
        beside = [other for other in same if blocks[other.module] == block]
        if beside:
            name += f", {_tail(attention, block, beside)}"
        result.append(replace(attention, name=name))
    return tuple(result)


def _tail(attention: Attention, block: str, beside: Sequence[Attention]) -> str:
    """What distinguishes an attention from others in its block: its module, and the number of the call; "head 2" if each is one head."""
    tail = attention.module.removeprefix(block).strip(".") or "attention"
    last = tail.rpartition(".")[2]
    before = sum(other.number < attention.number for other in beside)
    if all(other.heads == 1 for other in (attention, *beside)) and len({other.cross for other in beside}) == 1:
        return f"head {before}"
    if not last.isdecimal() and all(other.module.rpartition(".")[2] != last for other in beside):
        tail = last
    calls = [other.number for other in beside if other.module == attention.module]
    return f"{tail} {sum(number < attention.number for number in calls) + 1}" if calls else tail


def _made(provenance: Provenance, origin: Origin) -> Projection | None:
    """The projection that makes queries, keys or values (lead, D): each head once; None if several weights do, or none."""
    heads = list(dict.fromkeys(tuple(row) for row in origin.labels.tolist()))
    origins = [[provenance.origin_of(label) for label in row] for row in heads]
    uses = {id(source[0]) if source is not None else 0: source for row in origins for source in row}
    use = next(iter(uses.values())) if len(uses) == 1 else None
    if use is None or not isinstance(use[0], Use):
        return None
    index = tuple(tuple(source[1] for source in row if source is not None) for row in origins)
    norm = origin.norms[-1] if origin.norms else None
    return _projection(provenance, use[0], index, norm)


def _projection(
    provenance: Provenance, use: Use, index: tuple[tuple[int, ...], ...], norm: str | None = None, reads: bool = False
) -> Projection:
    biases = [b for b in provenance.ctx.uses if b.layer == use.layer and b.inp is None and b.slot.shape[2:] == (1, 1)]
    bias = biases[0].slot.source.path if biases and not reads else None
    return Projection(use.layer, use.slot.source.path, index, bias, norm, slot=use.slot, reads=reads)


def _input_of(provenance: Provenance, origin: Origin) -> Tensor | None:
    """The origin of what the projection of a part reads."""
    source = provenance.origin_of(int(origin.labels.flatten()[0])) if origin.labels.numel() else None
    return next(
        (read.labels for use, read, _ in provenance.calls if source and use is source[0] and read is not None), None
    )


def _reader(provenance: Provenance, attention: TracedAttention) -> Projection | None:
    """The first affine call that reads the heads of an attention, all of them."""
    count = attention.heads * attention.width
    for use, read, _ in provenance.calls:
        if read is None:
            continue
        numbers = (read.labels - attention.start).tolist()
        if sorted(numbers) == list(range(count)):
            by_head: list[list[int]] = [[] for _ in range(attention.heads)]
            for channel in sorted(range(count), key=lambda c: numbers[c]):
                by_head[numbers[channel] // attention.width].append(channel)
            return _projection(provenance, use, tuple(map(tuple, by_head)), reads=True)
    return None
