"""The residual stream after each block of a transformer: size, outliers, kurtosis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from excite.errors import ModelError
from excite.probes.base import Every, Probe, Reduction, Schedule, StepContext, Values
from excite.probes.findings import Finding, MetricSeries, Panel, number, rise, since
from excite.probes.vital_signs.sample import sample_pass


class ResidualStream(Probe):
    """Size of the residual stream after each block, on two sequences of the example.

    Records, per block:
        ``residual/rms/BLOCK``: root mean square over all entries of all tokens.
        ``residual/largest/BLOCK``: largest absolute value.
        ``residual/kurtosis/BLOCK``: fourth central moment over the squared variance; 3 for a normal distribution, large where
        a few channels or tokens carry outliers.

    A block is an item of a ``ModuleList`` (or ``Sequential``) that holds attention; the stream is its output. Padding, as the
    ``attention_mask`` of the example says it, does not count.

    Args:
        schedule: When to measure. Default: every 50 steps.

    Example:
        >>> from excite.probes import Every, ResidualStream
        >>> probe = ResidualStream(Every(100))
    """

    name = "residual"
    reduction = "mean"
    reductions: ClassVar[Mapping[str, Reduction]] = {"largest": "max"}
    requires = ("example",)
    panel = Panel(
        "residuals",
        "Residual stream",
        "Size of the residual stream after each block. A few entries that grow far beyond the rest show as a large kurtosis; "
        "they make low precision and quantization fail.",
        (("rms", "root mean square"), ("largest", "largest entry"), ("kurtosis", "kurtosis")),
        order=34,
        log=True,
        heatmap=True,
        docs="language-models.md#vital-signs",
    )

    def __init__(self, schedule: Schedule | None = None):
        super().__init__(Every(50) if schedule is None else schedule)

    def attach(self, ctx: StepContext) -> None:
        """Checks that blocks can be found."""
        if not sample_pass(ctx).streams:
            raise ModelError("no blocks found: expected a ModuleList of blocks whose attention modules are named so")

    def measure(self, ctx: StepContext) -> Values:
        """Measures the stream after each block."""
        return {
            f"{quantity}/{path}": getattr(signs, quantity)
            for path, signs in sample_pass(ctx).streams.items()
            for quantity in ("rms", "largest", "kurtosis")
        }

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        grown = {path: rise(series) for path, series in history.layers("residual/largest").items()}
        large = {path: up for path, up in grown.items() if up is not None and up.large and up.ratio > 10}
        if not large:
            return []
        path = max(large, key=lambda name: large[name].ratio)
        up = large[path]
        return [Finding("note", f"The largest entry of the residual stream after {path} grew from {number(up.before)} to "
                                f"{number(up.now)} {since(up)}.")]  # fmt: skip
