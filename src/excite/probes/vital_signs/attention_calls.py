"""Every call of attention while a model runs: the largest logit and the entropy of each head.

Kernels are not changed. For `scaled_dot_product_attention` the logits are computed again from the queries and keys it gets; where
the model calls softmax itself, its input has the logits. Of long sequences 128 queries are measured, with all keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from excite._core.intercept.functions import OPENED
from excite._core.intercept.together import Together
from excite.probes.vital_signs.tokens import PLACES, at_places, even_places, wide
from excite.wiring.activations import ActivationCall, table_activation

_SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_MASKED = -1e30  # logits below belong to pairs that may not attend: masks add the smallest number of a dtype
_ENTRIES = 1 << 26  # logits in memory at once
_SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention.

    Attributes:
        module: Path of the module that makes it.
        largest: Largest logit of each head, (heads,), over sequences, queries and the keys they may attend to.
        entropy: Mean over queries of the entropy −Σ p log p of each head, (heads,), in nats.
    """

    module: str
    largest: Tensor
    entropy: Tensor


def attention_signs(logits: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Largest logit and mean entropy of each head.

    Args:
        logits: (sequences, heads, queries, keys), −∞ where a query may not attend.
        tokens: (sequences, queries), 0 for queries that are padding. Queries that may attend to nothing do not count either.

    Returns:
        Two tensors (heads,). Entropies are means over queries, in nats.
    """
    largest, total, count = _head_sums(logits, tokens)
    return largest, total / count


def _head_sums(logits: Tensor, tokens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of each head, (..., heads): the largest logit, the sum of the entropies of queries that count, and their number."""
    logits = wide(logits).clamp_min(_MASKED)
    largest = logits.amax(-1)  # (..., sequences, heads, queries)
    counted = ~(largest <= _MASKED)  # NaN counts
    if tokens is not None and tokens.shape == (logits.shape[-4], logits.shape[-2]):
        counted = counted & tokens.bool()[:, None, :]
    log_p = logits.log_softmax(-1)
    entropy = log_p.exp().mul_(log_p).sum(-1).neg_()  # 0 · log 0 is 0, since logarithms are at least −1e30
    return (
        torch.where(counted, largest, -math.inf).amax((-3, -1)),
        torch.where(counted, entropy, 0.0).sum((-3, -1)),
        counted.sum((-3, -1)).to(entropy.dtype),
    )


def attention_logits(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    places: Tensor | None = None,
) -> Tensor:
    """Logits of `scaled_dot_product_attention`, (..., heads, queries, keys), −∞ where a query may not attend.

    Keys of grouped attention are shared by heads/groups consecutive query heads.

    Args:
        query: (..., heads, queries, channels).
        key: (..., groups, keys, channels).
        mask: Added, or False where a query may not attend; (..., queries, keys).
        causal: Whether query i attends to keys 0 to i.
        scale: Factor of the products; None for 1/√channels.
        places: Which queries are wanted; None for all.
    """
    mask = None if mask is None else at_places(mask, places, -2)
    return _products(at_places(query, places, -2), key, mask, causal, scale, places)


def _products(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float | None, places: Tensor | None
) -> Tensor:
    """Logits of queries that stand at some places."""
    positions = torch.arange(query.shape[-2], device=query.device) if places is None else places
    query, key = wide(query), wide(key)
    query = query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if key.dim() > 2 and key.shape[-3] != query.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    with torch.autocast(query.device.type, enabled=False):
        scores = query @ key.transpose(-1, -2)
    if causal:
        future = torch.arange(key.shape[-2], device=scores.device) > positions[:, None]
        scores = scores.masked_fill_(future, -math.inf)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores


_Cut = tuple[int, int, torch.device]  # queries of a call, logits of each of them, device


@dataclass(frozen=True)
class _Logits:
    """How logits are computed from queries and keys, and which queries these are."""

    causal: bool
    scale: float | None
    cut: _Cut
    chunk: int  # of the queries, which are measured in several chunks where their logits do not fit into memory


class AttentionMode(TorchFunctionMode):
    """While active, notes every call of attention; `finish` returns them.

    Queries and keys are copied when attention is called. Logits of calls of one shape are computed together, at the end or when
    there are many.

    Args:
        sequences: Size of the batch: separates the axis of heads where it is merged with that of sequences.
        tokens: (sequences, tokens), 0 for padding.
        modules: Paths of modules that are known to hold attention, such as those with a module for each head.
    """

    def __init__(self, sequences: int, tokens: Tensor | None = None, modules: Iterable[str] = ()):
        super().__init__()
        self.stack: list[str] = []  # paths of the modules that run
        self.activated: Callable[[ActivationCall], None] | None = None  # called before every activation of the table
        self._sequences, self._tokens, self._inside = sequences, tokens, tuple(f"{path}." for path in modules)
        self.headed: list[str] | None = (
            None  # with a list: modules whose merged axis has the heads in front, if all sequences are equal
        )
        self._modules: list[str] = []  # of every call
        self._together: Together[tuple[int, int], _Logits] = Together(self._signs, _ENTRIES)
        self._places: dict[_Cut, list[Tensor | None]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.activated is not None and (activation := table_activation(func, args, kwargs)) is not None:
            self.activated(activation)
        if func is F.scaled_dot_product_attention:
            self._kernel(dict(zip(_SDPA, args)) | kwargs)
        elif func in _SOFTMAX:
            self._softmax(args, kwargs)
        elif func in OPENED:  # nn.MultiheadAttention: its calls are intercepted one by one
            with self:
                return OPENED[func](*args, **kwargs)
        return func(*args, **kwargs)

    @torch.no_grad()
    def finish(self) -> list[AttentionCall]:
        """Every call, in the order of execution."""
        parts: list[list[tuple[Tensor, ...]]] = [[] for _ in self._modules]
        for (number, _), signs in self._together.finish().items():
            parts[number].append(signs)
        return [AttentionCall(module, *_joined(several)) for module, several in zip(self._modules, parts)]

    @torch.no_grad()
    def _kernel(self, a: dict[str, Any]) -> None:
        query, key, mask = a["query"], a["key"], a.get("attn_mask")
        if query.dim() == 3:  # (sequences · heads, tokens, width)
            query, key = self._with_heads(query), self._with_heads(key)
            mask = self._with_heads(mask) if mask is not None and mask.dim() == 3 else mask
        elif query.dim() != 4:
            return
        masks = () if mask is None else (mask[(None,) * (4 - mask.dim())],)
        self._add((query, *masks), (key,), key.shape[-2], bool(a.get("is_causal", False)), a.get("scale"))

    @torch.no_grad()
    def _softmax(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        logits = args[0] if args else kwargs.get("input")
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if not isinstance(logits, Tensor) or dim not in (-1, logits.dim() - 1) or logits.dim() not in (3, 4):
            return
        if logits.dim() == 3:
            # (sequences, tokens, classes) is no attention; (sequences · heads, queries, keys) is, in a module named so, or below one
            # if there are as many keys as queries: (sequences, tokens, experts) is not.
            module, square = self._module(), logits.shape[-1] == logits.shape[-2]
            named = "att" in module.rpartition(".")[2].lower() or (square and f"{module}.".startswith(self._inside))
            if not named or logits.shape[0] % self._sequences:
                return
            logits = self._with_heads(logits)
        self._add((logits,), (), logits.shape[-1])

    def _with_heads(self, x: Tensor) -> Tensor:
        if x.shape[0] % self._sequences:
            return x[None]
        if self.headed is not None and _heads_in_front(x, self._sequences):
            self.headed.append(self._module())
        separate: Tensor = x.unflatten(0, (self._sequences, -1))
        return separate

    def _add(
        self,
        by_query: tuple[Tensor, ...],
        unsplit: tuple[Tensor, ...],
        keys: int,
        causal: bool = False,
        scale: float | None = None,
    ) -> None:
        """Notes a call: tensors (sequences, heads, queries, ...) of which some queries are measured, and others that are not split."""
        first = by_query[0]
        cut = first.shape[-2], first.shape[:-2].numel() * keys, first.device
        if cut not in self._places:
            self._places[cut] = _chunks(*cut)
        for chunk, places in enumerate(self._places[cut]):
            copies = [_copied(tensor, places) for tensor in by_query] + [tensor.clone() for tensor in unsplit]
            entries = copies[0].shape[-2] * cut[1]
            settings = _Logits(causal, scale, cut, chunk)
            self._together.add((len(self._modules), chunk), *copies, key=settings, entries=entries)
        self._modules.append(self._module())

    def _signs(self, settings: _Logits, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Of stacks (calls, sequences, heads, queries, ...): what `_head_sums` returns, and the mean entropy."""
        places = self._places[settings.cut][settings.chunk]
        if len(tensors) == 1:
            logits = tensors[0]
        else:
            query, *mask, key = tensors
            logits = _products(query, key, mask[0] if mask else None, settings.causal, settings.scale, places)
        tokens = None if self._tokens is None else at_places(self._tokens, places, -1)
        largest, total, count = _head_sums(logits, tokens)
        return largest, total, count, total / count

    def _module(self) -> str:
        return self.stack[-1] if self.stack else ""


def _heads_in_front(x: Tensor, sequences: int) -> bool:
    """Whether x (sequences · heads, ...) of equal sequences is (heads · sequences, ...) instead."""

    def repeats(rows: Tensor) -> bool:
        return torch.allclose(rows[1:], rows[:1].expand_as(rows[1:]), rtol=1e-3, atol=1e-5)

    return not repeats(x.unflatten(0, (sequences, -1))) and repeats(x.unflatten(0, (-1, sequences)).transpose(0, 1))


def _copied(x: Tensor, places: Tensor | None) -> Tensor:
    taken = at_places(x, places, -2)
    return taken.clone() if taken is x else taken


def _joined(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor]:
    """Largest logits and mean entropies of a call from those of its parts."""
    if len(parts) == 1:
        largest, _, _, entropy = parts[0]
        return largest, entropy
    largests, totals, counts, _ = zip(*parts)
    return torch.stack(largests).amax(0), torch.stack(totals).sum(0) / torch.stack(counts).sum(0)


def _chunks(queries: int, entries: int, device: torch.device) -> list[Tensor | None]:
    """The queries to measure, in parts whose logits fit into memory; `entries` is the number of logits of one query."""
    places = even_places(queries, device=device)
    rows = max(1, _ENTRIES // max(1, entries))
    if rows >= min(queries, PLACES):
        return [places]
    return list((torch.arange(queries, device=device) if places is None else places).split(rows))
