"""Largest singular value of W_Q W_Kᵀ of every head."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from excite._core.calls import Pick
from excite._core.intercept.affine import clean_path
from excite._core.warn import warn_user
from excite.errors import InputError, ModelError
from excite.probes.base import Deferred, Every, Measurement, Probe, Schedule, StepContext, Values
from excite.probes.findings import MAX_NAMED, Finding, MetricSeries, Panel, number, rise, since
from excite.probes.vital_signs.sample import SEQUENCES, few_sequences
from excite.wiring.roles.attention import Attention, Projection
from excite.wiring.tracing import trace

_ENTRIES = 1 << 24  # of the matrices that are multiplied at once


def query_key_norms(query: Tensor, key: Tensor) -> Tensor:
    """σ₁ of W_Q W_Kᵀ of every head from the Gram matrices of its rows, (..., heads, channels, channels) each, on the CPU.

    With W_Q of shape (channels, width) per head, σ₁² is the largest eigenvalue of G_K G_Q, the same as that of S^½ Uᵀ G_K U S^½ for
    G_Q = U S Uᵀ: a matrix of the size of a head, not of the model.
    """
    # By torch, which uses one core in the background thread: numpy would start a thread on every core of the training.
    values, vectors = torch.linalg.eigh(query.double())
    half = vectors * values.clamp_min(0).sqrt()[..., None, :]
    largest: Tensor = torch.linalg.eigvalsh(half.mT @ key.double() @ half)[..., -1]
    return largest.clamp_min(0).sqrt()


class _Rows:
    """The rows of every head in one weight: a view of the weight where there is one, else an index that is kept on the device."""

    def __init__(self, weight: Tensor, projection: Projection, heads: Sequence[int]):
        index = torch.tensor([projection.index[head] for head in heads])
        self.weight, self.shape = weight, index.shape
        self._slot, self._stride, self._index = projection.slot, weight.stride(), index.to(weight.device)
        self._view = (
            None if hasattr(weight, "full_tensor") else _view(self._slot.out_rows(weight.detach()), weight, index)
        )

    @property
    def count(self) -> int:
        """Number of entries of the rows."""
        return self._index.numel() * math.prod(self._slot.shape) // self._slot.outputs

    def rows(self) -> Tensor:
        """(heads, channels, width); of a weight that is sharded by a call of all processes."""
        if self._view is not None and self.weight.stride() == self._stride:
            size, stride, start = self._view
            return self.weight.as_strided(size, stride, self.weight.storage_offset() + start)
        full = getattr(self.weight, "full_tensor", None)
        weight = self.weight.detach() if full is None else full().detach()
        return self._slot.out_rows(weight)[self._index]


_View = tuple[tuple[int, ...], tuple[int, ...], int]  # size, strides, start


def _view(rows: Tensor, weight: Tensor, index: Tensor) -> _View | None:
    """Where rows (heads, channels) of `rows`, itself a view of `weight`, are in the memory of the weight, if they are evenly spaced."""
    if rows.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
        return None
    heads, channels = index.shape
    first = int(index[0, 0])
    apart = int(index[1, 0]) - first if heads > 1 else 0
    within = int(index[0, 1]) - first if channels > 1 else 0
    even = first + apart * torch.arange(heads)[:, None] + within * torch.arange(channels)
    if apart < 0 or within < 0 or not torch.equal(index, even):
        return None
    row, column = rows.stride()
    start = int(rows.storage_offset() + first * row - weight.storage_offset())
    return (heads, channels, rows.shape[1]), (apart * row, within * row, column), start


def gram_matrices(several: Sequence[_Rows]) -> Tensor:
    """(count, heads, channels, channels) in float64 of the rows of several weights, which agree in their shapes."""
    maximum = max(1, _ENTRIES // max(1, several[0].count))
    grams = []
    for start in range(0, len(several), maximum):
        rows = torch.stack([weight.rows() for weight in several[start : start + maximum]]).double()
        grams.append(rows @ rows.mT)
    return torch.cat(grams) if len(grams) > 1 else grams[0]


@dataclass(frozen=True)
class _Layer:
    """The queries and keys of one attention, with the names of its heads and the key head of each."""

    names: list[str]
    query: _Rows
    key: _Rows
    groups: tuple[int, ...]

    def like(self) -> tuple[object, ...]:
        """Layers that agree in this are computed together."""
        both = self.query, self.key
        return self.groups, *((rows.shape, rows.weight.shape, rows.weight.dtype, rows.weight.device) for rows in both)


class AttentionSpectrum(Probe):
    """Largest singular value of W_Q W_Kᵀ of every head: how fast attention logits can grow.

    A logit of head h is xᵀ W_Q W_Kᵀ y/√d but for biases, rotations and norms between, so that it is at most σ₁ ‖x‖ ‖y‖/√d, and the entropy
    of attention is bounded from below by a function of it (Zhai et al. 2023). Under QK-norm logits do not depend on its size.

    Records, for the whole network (the largest) and per head (named by the module that calls attention):
        ``qk/sigma[/MODULE/headN]``: σ₁ of W_Q W_Kᵀ of the query head with its key head.

    Which rows of which weights belong to a head is found by `excite.trace`. Where it cannot be determined, as for weights that are computed
    on the fly and for LoRA's adapters, one warning names the module. Singular values are computed in float64 in the background.

    Args:
        schedule: When to measure. Default: every 50 steps.
        output: Which part of the model's return value is the output; see `excite.trace`.

    Example:
        >>> from excite.probes import AttentionSpectrum, Every
        >>> probe = AttentionSpectrum(Every(100))
    """

    name = "qk"
    reduction = "first"
    requires = ("example",)
    panel = Panel(
        "attention",
        labels=(("sigma", "σ₁ of W_Q W_Kᵀ"),),
        order=33,
    )

    def __init__(self, schedule: Schedule | None = None, output: Pick = None):
        super().__init__(Every(50) if schedule is None else schedule)
        self.output = output
        self._alike: dict[tuple[object, ...], list[_Layer]] = {}

    def attach(self, ctx: StepContext) -> None:
        """Finds the weights of every head; warns once of modules whose weights cannot be determined."""
        if ctx.example is None:
            raise InputError("this probe needs an example batch: excite.watch(model, example=x, ...)")
        if not ctx.wirings:
            output = _pick(ctx, self.output)
            ctx.wirings[repr(output)] = trace(ctx.model, few_sequences(ctx.example, SEQUENCES), output=output)
        wiring = next(iter(ctx.wirings.values()))
        weights = {clean_path(path): p for path, p in ctx.model.named_parameters(remove_duplicate=False)}
        unknown, calls_by_module = [], Counter[str]()
        projections = {p.layer for a in wiring.attentions for p in (a.query, a.key, a.value) if p is not None}
        others = [layer.name for layer in wiring.layers if layer.name not in projections]
        for attention in wiring.attentions:
            module = attention.module or "attention"
            calls_by_module[module] += 1
            name = f"{module}#{calls_by_module[module]}" if calls_by_module[module] > 1 else module
            rows = None if _adapted(attention, others) else _rows(attention, weights)
            if rows is None:
                unknown.append(name)
            else:
                layer = _Layer(
                    [f"sigma/{name}/head{head}" for head in range(attention.heads)], *rows, tuple(attention.groups)
                )
                self._alike.setdefault(layer.like(), []).append(layer)
        if not self._alike:
            raise ModelError(
                "no weights of queries and keys found: expected attention whose projections excite.trace can determine"
            )
        if unknown:
            more = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
            warn_user(
                f"weights of queries and keys of {', '.join(unknown[:MAX_NAMED])}{more} cannot be determined, as where they are "
                "computed on the fly; others are measured"
            )

    def detach(self) -> None:
        """Releases memory; called when the watch is closed."""
        self._alike = {}

    @torch.no_grad()
    def measure(self, ctx: StepContext) -> Measurement:
        """Measures the Gram matrices on the device; singular values follow in the background."""
        grams = [
            (
                layers,
                gram_matrices([layer.query for layer in layers]),
                gram_matrices([layer.key for layer in layers]),
            )
            for layers in self._alike.values()
        ]

        def compute() -> Values:
            values: dict[str, float] = {}
            for layers, query, key in grams:
                norms = query_key_norms(query.cpu(), key.cpu()[:, list(layers[0].groups)])
                values |= dict(zip((name for layer in layers for name in layer.names), norms.flatten().tolist()))
            return {"sigma": max(values.values()), **values} if values else {}

        return Deferred(compute) if any(query.device.type != "cpu" for _, query, _ in grams) else compute()

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        up = rise(history["qk/sigma"])
        if up is None or not up.large or up.ratio < 10:
            return []
        return [Finding("note", f"The largest singular value of W_Q W_Kᵀ grew from {number(up.before)} to {number(up.now)} {since(up)}.")]  # fmt: skip


def _pick(ctx: StepContext, output: Pick) -> Pick:
    """The output as it was given; `logits` for models of Transformers, which return several."""
    return output if output is not None or not hasattr(ctx.model, "config") else "logits"


def _rows(attention: Attention, weights: Mapping[str, Tensor]) -> tuple[_Rows, _Rows] | None:
    query, key = attention.query, attention.key
    if query is None or key is None or query.parameter not in weights or key.parameter not in weights:
        return None
    if not (weights[query.parameter].is_floating_point() and weights[key.parameter].is_floating_point()):
        return None  # quantized: the weight is computed from it
    of_query, of_key = range(attention.heads), range(attention.key_heads)
    return _Rows(weights[query.parameter], query, of_query), _Rows(weights[key.parameter], key, of_key)


def _adapted(attention: Attention, layers: Sequence[str]) -> bool:
    """Whether queries or keys are sums of several layers in a module of their own below the attention, as with LoRA's adapters.

    Args:
        attention: The attention.
        layers: Names of the layers that make no queries, keys or values of themselves.
    """
    for projection in (attention.query, attention.key):
        parent = "" if projection is None else projection.layer.rpartition(".")[0]
        if parent.startswith(f"{attention.module}.") and any(layer.startswith(f"{parent}.") for layer in layers):
            return True
    return False
