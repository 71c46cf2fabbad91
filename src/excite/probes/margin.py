"""Margins of a fixed small batch while a network trains."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from excite._core.checks import check_dense
from excite._core.preserve import device_of
from excite.errors import InputError
from excite.probes.base import Probe, StepContext, Values
from excite.probes.findings import (
    Finding,
    MetricSeries,
    Panel,
    fall,
    finite,
    learned,
    number,
    rise,
    since,
    since_step,
)
from excite.probes.schedules import Every, Schedule

_ACCURATE = 0.1  # of the points, by which two networks may differ in accuracy for their margins to compare


class Margin(Probe):
    """Distances of a few fixed points to the decision boundary, found by attack (`excite.margins`).

    Records:
        ``margin/median``: median over the points.
        ``margin/low``: a tenth of the points are closer than this.
        ``margin/misclassified``: fraction of the points that are misclassified.
        ``margin/censored``: fraction for which no adversarial example was found; they count as infinitely far.

    Fewer searches than `excite.margins` does by default, and no evidence: for the course of a training, not for a result.

    Args:
        x: Points (N, ...).
        y: Labels (N,).
        schedule: When to measure. Default: every 500 steps.
        **options: Further arguments of `excite.margins`.

    Raises:
        InputError: If there is not one label for each point.

    Example:
        >>> from excite.probes import Every, Margin
        >>> watch = excite.watch(model, example=x, probes=[Margin(x, y, Every(500))])
    """

    name = "margin"
    panel = Panel(
        "margin",
        "Margin",
        "How far an input has to be changed before the decision changes, found by attack on a fixed small batch. Larger is "
        "more robust.",
        (
            ("median", "median margin"),
            ("low", "margin of the closest tenth"),
            ("misclassified", "fraction misclassified"),
            ("censored", "fraction without an adversarial example"),
        ),
        order=20,
        probes=("margins",),
        docs="margins.md",
    )
    reduction = "mean"

    def __init__(self, x: Tensor, y: Tensor, schedule: Schedule | None = None, **options: Any):
        super().__init__(Every(500) if schedule is None else schedule)
        for tensor in (x, y):
            if isinstance(tensor, Tensor):
                check_dense(tensor, "margin_batch")
        if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.dim() and len(x) == y.numel() > 0):
            shapes = [tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__ for tensor in (x, y)]
            raise InputError(
                f"margin_batch: expected points (N, ...) and one label each; got {shapes[0]} and {shapes[1]}"
            )
        self.x, self.y = x.detach().clone(), y.detach().clone()
        from excite.margin import SearchOptions

        quick = {"steps": 20, "restarts": 1, "evidence": False, "certify": False}
        quick |= {key: options.pop(key) for key in ("lipschitz", "seed", *quick) if key in options}
        self.options = {"options": SearchOptions(**quick), **options}  # type: ignore[arg-type]

    def measure(self, ctx: StepContext) -> Values:
        """Measures the margins of the fixed points."""
        from excite.margin import margins

        device = device_of(ctx.model)
        measured = margins(ctx.model, self.x.to(device), self.y.to(device), **self.options)
        return {
            "median": measured.median,
            "low": measured.quantile(0.1),
            "misclassified": float((measured.values == 0).double().mean()),
            "censored": float(measured.censored.double().mean()),
        }

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        return _margin(history)


def _as_accurate(history: MetricSeries) -> int:
    """The first step from which on the fraction misclassified is within 0.1 of the last one."""
    steps, wrong = finite(history["margin/misclassified"])
    if not len(wrong):
        return 0
    other = np.flatnonzero(np.abs(wrong - wrong[-1]) > _ACCURATE)
    return 0 if not len(other) else int(steps[other[-1]]) + 1


def _margin(history: MetricSeries) -> list[Finding]:
    for key in ("margin/median", "margins/median"):
        for layer, series in history.of(key).items():
            of_layer = f" ({layer})" if layer else ""
            # Margins of a network that has not learned yet are large, or 0, for no good reason: they are no baseline.
            series = since_step(series, max(1, learned(history), _as_accurate(history)))
            down, up = fall(series), rise(series)
            if down is not None and down.large:
                return [
                    Finding(
                        "warning",
                        f"The median margin{of_layer} fell from {number(down.before)} to {number(down.now)} {since(down)}: smaller changes of the input change decisions.",
                        "Stop earlier, or train with perturbations.",
                    )
                ]
            if up is not None and up.large:
                return [
                    Finding(
                        "good",
                        f"The median margin{of_layer} grew from {number(up.before)} to {number(up.now)} {since(up)}.",
                    )
                ]
    return []
