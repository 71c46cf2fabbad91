"""Largest singular value of W_Q W_Kᵀ of every head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from excite._core.calls import Pick
from excite._core.intercept.affine import clean_path
from excite._core.warn import warn_user
from excite._core.wrappers import is_sharded
from excite.errors import InputError, ModelError
from excite.probes.base import Deferred, Every, Measurement, Probe, Schedule, StepContext, Values
from excite.probes.findings import MAX_NAMED, Finding, MetricSeries, Panel, number, rise, since
from excite.probes.vital_signs.sample import SEQUENCES, few_sequences
from excite.wiring.roles.attention import Attention, Projection
from excite.wiring.tracing import trace

_ENTRIES = 1 << 24  # of the matrices that are multiplied at once


def query_key_norms(query: Tensor, key: Tensor) -> Tensor:
    """σ₁ of W_Q W_Kᵀ of every head from the Gram matrices of its rows, (heads, channels, channels) each, on the CPU.

    With W_Q of shape (channels, width) per head, σ₁² is the largest eigenvalue of G_K G_Q, the same as that of S^½ Uᵀ G_K U S^½ for
    G_Q = U S Uᵀ: a matrix of the size of a head, not of the model.
    """
    # By torch, which uses one core in the background thread: numpy would start a thread on every core of the training.
    values, vectors = torch.linalg.eigh(query.double())
    half = vectors * values.clamp_min(0).sqrt()[:, None, :]
    largest: Tensor = torch.linalg.eigvalsh(half.mT @ key.double() @ half)[:, -1]
    return largest.clamp_min(0).sqrt()


@dataclass(frozen=True)
class _Rows:
    """Where the rows of every head are in one weight; the index is kept on the device."""

    weight: Tensor
    projection: Projection
    index: Tensor

    @classmethod
    def of(cls, weight: Tensor, projection: Projection, heads: tuple[int, ...]) -> _Rows:
        index = torch.tensor([projection.index[head] for head in heads], device=weight.device)
        return cls(weight, projection, index)

    def rows(self) -> Tensor:
        """(heads, channels, width)."""
        full = getattr(self.weight, "full_tensor", None)
        weight = self.weight.detach() if full is None else full().detach()
        return self.projection.slot.out_rows(weight)[self.index]


def gram_matrices(several: Sequence[Tensor]) -> list[Tensor]:
    """(heads, channels, channels) in float64 of each (heads, channels, width); those of one shape are computed together."""
    grams: list[Tensor] = []
    start = 0
    while start < len(several):
        first, end = several[start], start + 1
        maximum = max(1, _ENTRIES // max(1, first.numel()))
        while end < len(several) and end - start < maximum and _alike(several[end], first):
            end += 1
        rows = torch.stack(list(several[start:end])).double()
        grams += (rows @ rows.mT).unbind()
        start = end
    return grams


def _fetched(several: Sequence[Tensor]) -> Sequence[Tensor]:
    """On the CPU, by one transfer where they are alike."""
    if len({(tensor.shape, tensor.device) for tensor in several}) == 1:
        return torch.stack(list(several)).cpu().unbind()
    return [tensor.cpu() for tensor in several]


def _alike(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.device == second.device and first.dtype == second.dtype


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
        self._heads: list[tuple[list[str], _Rows, _Rows]] = []

    def attach(self, ctx: StepContext) -> None:
        """Finds the weights of every head; warns once of modules whose weights cannot be determined."""
        if ctx.example is None:
            raise InputError("this probe needs an example batch: excite.watch(model, example=x, ...)")
        if is_sharded(ctx.model):
            raise ModelError("AttentionSpectrum: the weights are sharded (FSDP), and excite.trace cannot follow them")
        if not ctx.wirings:
            output = _pick(ctx, self.output)
            ctx.wirings[repr(output)] = trace(ctx.model, few_sequences(ctx.example, SEQUENCES), output=output)
        wiring = next(iter(ctx.wirings.values()))
        weights = {clean_path(path): p for path, p in ctx.model.named_parameters(remove_duplicate=False)}
        unknown, calls_by_module = [], Counter[str]()
        for attention in wiring.attentions:
            module = attention.module or "attention"
            calls_by_module[module] += 1
            name = f"{module}#{calls_by_module[module]}" if calls_by_module[module] > 1 else module
            rows = None if _adapted(attention, [layer.name for layer in wiring.layers]) else _rows(attention, weights)
            if rows is None:
                unknown.append(name)
            else:
                self._heads.append(([f"sigma/{name}/head{head}" for head in range(attention.heads)], *rows))
        if not self._heads:
            raise ModelError(
                "no weights of queries and keys found: expected attention whose projections excite.trace can tell"
            )
        if unknown:
            more = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
            warn_user(
                f"weights of queries and keys of {', '.join(unknown[:MAX_NAMED])}{more} cannot be determined, as where they are "
                "computed on the fly; others are measured"
            )

    def detach(self) -> None:
        """Releases memory; called when the watch is closed."""
        self._heads = []

    @torch.no_grad()
    def measure(self, ctx: StepContext) -> Measurement:
        """Measures the Gram matrices on the device; singular values follow in the background."""
        heads = self._heads
        queries = gram_matrices([query.rows() for _, query, _ in heads])
        keys = gram_matrices([key.rows() for _, _, key in heads])

        def compute() -> Values:
            values: dict[str, float] = {}
            for (names, _, _), query, key in zip(heads, _fetched(queries), _fetched(keys)):
                values |= dict(zip(names, query_key_norms(query, key).tolist()))
            return {"sigma": max(values.values()), **values} if values else {}

        return Deferred(compute) if queries and queries[0].device.type != "cpu" else compute()

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
    heads = tuple(range(attention.heads))
    return _Rows.of(weights[query.parameter], query, heads), _Rows.of(weights[key.parameter], key, attention.groups)


def _adapted(attention: Attention, layers: Sequence[str]) -> bool:
    """Whether queries or keys are sums of several layers in a module of their own below the attention, as with LoRA's adapters."""
    for projection in (attention.query, attention.key):
        parent = "" if projection is None else projection.layer.rpartition(".")[0]
        if parent.startswith(f"{attention.module}.") and sum(layer.startswith(f"{parent}.") for layer in layers) > 1:
            return True
    return False
