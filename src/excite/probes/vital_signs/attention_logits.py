"""Attention by head: the largest logit and the entropy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from excite._core.warn import warn_user
from excite.errors import ModelError
from excite.probes.base import Every, Probe, Reduction, Schedule, StepContext, Values
from excite.probes.findings import MAX_NAMED, Finding, MetricSeries, Panel, finite, number, rise, since
from excite.probes.vital_signs.attention_calls import AttentionCall
from excite.probes.vital_signs.blocks import attention_modules
from excite.probes.vital_signs.sample import SEQUENCES, few_sequences, heads_in_front, running, sample_pass
from excite.wiring.export import resized

_LARGE = 50.0  # logits above which softmax is close to one-hot, and trainings in bfloat16 have diverged
_COLLAPSED = 0.05  # nats


class AttentionLogits(Probe):
    """Largest attention logit and entropy of every head, on two sequences of the example.

    Of a sequence of more than 128 tokens, 128 evenly spaced queries are measured, with all the keys that they may attend to.

    Records, for the whole network and per head (named by the module that calls attention):
        ``attention/logit[/MODULE/headN]``: largest q·k/√d with bias and mask, over queries and the keys they may attend to.
        ``attention/entropy[/MODULE/headN]``: mean over queries of −Σ p log p, in nats; the value of the network is the smallest.

    Logits that grow without bound and entropies that fall to zero precede divergence (Zhai et al. 2023, Wortsman et al. 2023). The
    pass is one of its own in evaluation mode: the training step and its kernels are not changed. For
    ``scaled_dot_product_attention`` logits are computed again from the queries and keys that it gets; where the model calls
    softmax itself, its input has the logits. Values are computed in float32 or better. Padding, as the ``attention_mask`` of the
    example says it, does not count.

    A module named after attention that calls neither, such as a kernel of another package, is named in one warning.

    Args:
        schedule: When to measure. Default: every 50 steps.

    Example:
        >>> from excite.probes import AttentionLogits, Every
        >>> probe = AttentionLogits(Every(100))
    """

    name = "attention"
    reduction = "max"
    reductions: ClassVar[Mapping[str, Reduction]] = {"entropy": "mean"}
    requires = ("example",)
    panel = Panel(
        "attention",
        "Attention by head",
        "The largest attention logit of each head, and the mean entropy of its attention. Logits that keep growing, and "
        "entropies that fall to zero, precede divergence.",
        (("logit", "largest logit"), ("entropy", "entropy (nats)")),
        order=33,
        heatmap=True,
        docs="language-models.md#vital-signs",
    )

    def __init__(self, schedule: Schedule | None = None):
        super().__init__(Every(50) if schedule is None else schedule)

    def attach(self, ctx: StepContext) -> None:
        """Finds the calls of attention; warns once of modules whose attention cannot be seen."""
        calls = sample_pass(ctx).attention
        unseen = unseen_attention(ctx.model, calls)
        if not calls:
            named = f" ({_listed(unseen)})" if unseen else ""
            raise ModelError(
                f"no attention can be seen{named}: expected scaled_dot_product_attention, or softmax over logits "
                "(sequences, heads, queries, keys); a custom kernel hides its logits"
            )
        self._refuse_heads_in_front(ctx)
        if unseen:
            warn_user(
                f"attention of {_listed(unseen)} cannot be seen, as in a custom kernel: expected "
                "scaled_dot_product_attention or softmax over its logits; others are measured"
            )

    @staticmethod
    def _refuse_heads_in_front(ctx: StepContext) -> None:
        """Where heads and sequences share an axis, sequences are expected in front: equal ones show it."""
        assert ctx.example is not None
        same = resized(few_sequences(ctx.example, 1), SEQUENCES)
        with running(SEQUENCES):
            headed = heads_in_front(ctx.model, same)
        if headed:
            raise ModelError(
                f"{_listed(headed)} merges heads and sequences into one axis with the heads in front: expected (sequences · heads, "
                "tokens, channels), or an axis for each"
            )

    def measure(self, ctx: StepContext) -> Values:
        """Measures the attention of each head on the sample."""
        values: dict[str, Tensor] = {}
        calls = sample_pass(ctx).attention
        for name, call in head_calls(calls):
            for head, (logit, entropy) in enumerate(zip(call.largest.unbind(), call.entropy.unbind())):
                values[f"logit/{name}/head{head}"], values[f"entropy/{name}/head{head}"] = logit, entropy
        if calls:
            device = calls[0].largest.device
            values["logit"] = torch.cat([call.largest.to(device) for call in calls]).amax()
            values["entropy"] = torch.cat([call.entropy.to(device) for call in calls]).amin()
        return values

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        return [*_growing(history), *_collapsed(history)]


def head_calls(calls: Sequence[AttentionCall]) -> Iterator[tuple[str, AttentionCall]]:
    """Calls with names: the path of the module, with "#2" for its second call."""
    calls_by_name: Counter[str] = Counter()
    for call in calls:
        name = call.module or "attention"
        calls_by_name[name] += 1
        yield (f"{name}#{calls_by_name[name]}" if calls_by_name[name] > 1 else name), call


def unseen_attention(model: nn.Module, calls: Sequence[AttentionCall]) -> list[str]:
    """Innermost modules named after attention, other than containers and helpers without weights, that made no call."""
    modules = attention_modules(model)
    called = {call.module for call in calls}
    innermost = [path for path in modules if not any(other.startswith(f"{path}.") for other in modules)]
    return [
        path
        for path in innermost
        if next(modules[path].parameters(), None) is not None
        and not any(
            path_called == path or path_called.startswith(f"{path}.") or path.startswith(f"{path_called}.")
            for path_called in called
        )
    ]


def _listed(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - MAX_NAMED} more" if len(paths) > MAX_NAMED else ""
    return f"{', '.join(paths[:MAX_NAMED])}{more}"


def _growing(history: MetricSeries) -> list[Finding]:
    rises = {head: rise(series) for head, series in history.layers("attention/logit").items()}
    large = {head: up for head, up in rises.items() if up is not None and up.large and up.now > _LARGE}
    if not large:
        return []
    head = max(large, key=lambda name: large[name].now)
    up = large[head]
    more = f"; {len(large) - 1} more heads are above {number(_LARGE)}" if len(large) > 1 else ""
    return [Finding("warning", f"The largest attention logit of {head} grew from {number(up.before)} to {number(up.now)} {since(up)}{more}.",
                    "Normalize queries and keys (QK-norm), or lower the learning rate of these projections.")]  # fmt: skip


def _collapsed(history: MetricSeries) -> list[Finding]:
    last = {head: finite(series)[1] for head, series in history.layers("attention/entropy").items()}
    low = {
        head: float(values[-1])
        for head, values in last.items()
        if len(values) > 1 and values[-1] < _COLLAPSED < values[0]
    }
    if not low:
        return []
    names = sorted(low, key=low.__getitem__)
    return [Finding("warning", f"The attention of {_listed(names)} has collapsed onto one token: its entropy is "
                               f"{number(low[names[0]])} nats.", "Normalize queries and keys (QK-norm).")]  # fmt: skip
