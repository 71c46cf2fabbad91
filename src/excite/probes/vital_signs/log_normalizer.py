"""log Z of the output: the logarithm of the sum of the exponentials of the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from excite._core.calls import Pick
from excite.probes.base import Every, Probe, Reduction, Schedule, StepContext, Values
from excite.probes.findings import Finding, MetricSeries, Panel, number, rise, since
from excite.probes.vital_signs.sample import logits_of, sample_pass
from excite.probes.vital_signs.tokens import at_places, even_places, wide


def log_normalizer(logits: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """log Z = log Σ exp(logits) of every token: its mean over tokens, and its largest absolute value.

    Args:
        logits: (..., tokens, classes).
        tokens: Mask (..., tokens), 0 for tokens that do not count.

    Returns:
        Two tensors with one element, in float32 or better.

    Example:
        >>> import torch
        >>> from excite.probes.vital_signs.log_normalizer import log_normalizer
        >>> round(float(log_normalizer(torch.zeros(3, 2))[0]), 4)
        0.6931
    """
    log_z = torch.logsumexp(wide(logits), -1)
    counted = torch.ones_like(log_z) if tokens is None or tokens.shape != log_z.shape else (tokens != 0).to(log_z.dtype)
    return (counted * log_z).sum() / counted.sum(), (counted * log_z.abs()).amax()


class LogNormalizer(Probe):
    """log Z = log Σ exp(logits) of the output, over the tokens of two sequences of the example.

    Of a sequence of more than 128 tokens, 128 evenly spaced ones are measured.

    Records:
        ``log_z/mean``: mean over tokens.
        ``log_z/largest``: largest absolute value.

    Cross-entropy does not change if all logits of a token shift together, so that nothing keeps log Z near zero; logits that drift
    lose precision in bfloat16, and precede divergence at the output (Wortsman et al. 2023).

    Args:
        schedule: When to measure. Default: every 50 steps.
        output: Which part of the model's return value holds the logits; by default ``logits`` if there is one.

    Example:
        >>> from excite.probes import Every, LogNormalizer
        >>> probe = LogNormalizer(Every(100))
    """

    name = "log_z"
    reduction = "mean"
    reductions: ClassVar[Mapping[str, Reduction]] = {"largest": "max"}
    requires = ("example",)
    panel = Panel(
        "log-z",
        "log Z of the output",
        "Logarithm of the sum of the exponentials of the output logits. Cross-entropy does not hold it near zero; a drift costs "
        "precision and precedes divergence at the output.",
        (("mean", "mean"), ("largest", "largest absolute value")),
        order=35,
        docs="language-models.md#vital-signs",
    )

    def __init__(self, schedule: Schedule | None = None, output: Pick = None):
        super().__init__(Every(50) if schedule is None else schedule)
        self.output = output

    def attach(self, ctx: StepContext) -> None:
        """Checks that the model returns logits."""
        logits_of(sample_pass(ctx).output, self.output)

    def measure(self, ctx: StepContext) -> Values:
        """Measures log Z on the sample."""
        sample = sample_pass(ctx)
        logits, tokens = logits_of(sample.output, self.output), sample.tokens
        if logits.dim() > 2:
            places = even_places(logits.shape[-2], device=logits.device)
            logits, tokens = at_places(logits, places, -2), None if tokens is None else at_places(tokens, places, -1)
        mean, largest = log_normalizer(logits, tokens)
        return {"mean": mean, "largest": largest}

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        up = rise(history["log_z/largest"])
        if up is None or not up.large or up.now < 50:
            return []
        return [Finding("warning", f"log Z of the output grew from {number(up.before)} to {number(up.now)} {since(up)}.",
                        "Add a z-loss, 1e-4 · (log Z)², or decay the weights of the output layer.")]  # fmt: skip
