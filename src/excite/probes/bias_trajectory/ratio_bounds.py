"""Lemma 1 for the samples of one pass: local Lipschitz constants between two multiples of the normalized updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from excite.probes.bias_trajectory.hooks import row_norms
from excite.probes.bias_trajectory.layer_operators import Estimate, LayerOperator
from excite.probes.bias_trajectory.sites import TracedLayer


@dataclass(frozen=True)
class RatioBounds:
    """Read off the weights when it was made. `result` returns the values; it waits for the device."""

    updates: Tensor  # (B,), NaN for a sample without a loss gradient
    gradient_norms: Tensor  # (B,)
    sigma: Estimate
    minimum: Callable[[], Tensor | None]

    @staticmethod
    def of(site: TracedLayer, gradient: Tensor, errors: Tensor, operator: LayerOperator) -> RatioBounds:
        """From dL/dz and ‖dL/df‖ of a pass. σ is followed from measurement to measurement, and what that leaves is its error."""
        updates, gradient_norms, active = ratio_and_slope(site, gradient, errors, operator)
        return RatioBounds(updates, gradient_norms, operator.follow(), operator.smallest_active(active))

    def result(self, vector: bool) -> tuple[dict[str, Any], bool]:
        """Values by name, and whether σ is an estimate. For a `vector` as output there is no upper bound."""
        (sigma, error), minimum = self.sigma.result(), self.minimum()
        upper, margin = self.updates * sigma, 1e-5 + 2 * error
        bad = self.gradient_norms > upper * (1 + margin)
        values: dict[str, Any] = {
            "sigma": sigma,
            "lipschitz": self.gradient_norms.nanmean(),
            "lipschitz_max": largest(self.gradient_norms),
        }
        if not vector:
            values["upper"] = upper.nanmean()
        if minimum is not None:
            lower = self.updates * minimum
            bad |= self.gradient_norms < lower * (1 - margin) - margin * upper * (self.updates.dtype != torch.float64)
            values["lower"] = lower.nanmean()
        return values | {"violations": bad.sum()}, error > 0


def largest(values: Tensor) -> Tensor:
    """The largest that is a number; NaN if there is none, as where no sample has a loss gradient."""
    return torch.where(values.isnan().all(), math.nan, torch.where(values.isnan(), -math.inf, values).max())


def ratio_and_slope(
    site: TracedLayer, gradient: Tensor, errors: Tensor, operator: LayerOperator | None = None
) -> tuple[Tensor, ...]:
    """Normalized update, local Lipschitz constant and which rows are active, from dL/dz and ‖dL/df‖; NaN where that is 0."""
    gradient = gradient.movedim(site.axis, 0)
    operator = operator or LayerOperator(site)
    nonzero = torch.where(errors > 0, errors, torch.nan)
    gradient_norms = row_norms(operator.transpose(gradient))
    return row_norms(gradient) / nonzero, gradient_norms / nonzero, gradient != 0
