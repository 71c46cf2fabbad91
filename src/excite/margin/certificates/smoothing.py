"""Randomized smoothing: 2-norm certificates for networks of any size, for the smoothed classifier (Cohen, Rosenfeld, Kolter, 2019).

The smoothed classifier decides for the class that the model decides for most often at x + N(0, σ²). If that class has a
probability of at least p > 1/2, no perturbation of 2-norm below σ Φ⁻¹(p) changes its decision. A lower bound of p comes from
samples, so that each radius holds with a probability, not for certain. Nothing is said about the model without the noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from excite._core.calls import Pick, pick_output
from excite._core.checks import (
    check_count,
    check_model,
    check_number,
    check_seed,
    check_weights,
    model_errors,
    shown,
    to_array,
)
from excite._core.preserve import eval_mode
from excite.errors import InputError
from excite.margin.inputs import check_labels, check_outputs, check_points


@dataclass(frozen=True)
class SmoothedMargins:
    """Certified 2-norm margins of N points under the smoothed classifier, each valid with probability `level`.

    Attributes:
        radii: (N,), float64; 0 where the smoothed classifier is wrong or abstains.
        predicted: (N,), its decisions; −1 where it abstains.
        sigma: standard deviation of the noise.
        samples: noisy copies per point behind each radius.
        level: probability, at least, that the decision and the radius of one point are right.

    Example:
        >>> model, x = torch.nn.Linear(4, 3), torch.rand(5, 4)
        >>> found = smoothed_margins(model, x, model(x).argmax(1), sigma=0.1, samples=200)
        >>> bool((found.radii >= 0).all())
        True
    """

    radii: Tensor
    predicted: Tensor
    sigma: float
    samples: int
    level: float

    @property
    def abstained(self) -> Tensor:
        """(N,): no class is clearly ahead, so that nothing is certified."""
        return self.predicted < 0

    def certified_accuracy(self, eps: Any) -> Any:
        """The fraction of points that the smoothed classifier decides rightly for every perturbation of 2-norm up to eps.

        Args:
            eps: one distance, or an array of any shape.

        Returns:
            A number for a number, an array for an array.

        Raises:
            InputError: if a distance is negative or not a number.
        """
        at = to_array("eps", eps)
        if np.isnan(at).any() or (at < 0).any():
            raise InputError(f"eps: expected distances of at least 0; got {shown(eps)}")
        radii = np.sort(self.radii.numpy())
        fraction = 1 - np.searchsorted(radii, at, side="right") / len(radii)
        return float(fraction) if at.ndim == 0 else fraction

    def __str__(self) -> str:
        n, abstained = len(self.radii), int(self.abstained.sum())
        wrong = int((self.radii == 0).sum()) - abstained
        return (
            f"smoothed by noise of standard deviation {self.sigma:g}, {self.samples} samples: median certified 2-norm margin "
            f"{float(self.radii.median()):.4g} of {n} points, each with probability {self.level:g}; {wrong} wrong, {abstained} "
            "abstained\nabout the smoothed classifier, not about the model itself"
        )


@model_errors
def smoothed_margins(
    model: nn.Module, x: Tensor, y: Tensor, *, sigma: float = 0.25, samples: int = 1000, selection: int = 100,
    level: float = 0.999, threshold: float = 0.5, output: Pick = None, batch: int = 1000, seed: int = 0,
) -> SmoothedMargins:  # fmt: skip
    """Certified 2-norm margins of the smoothed classifier, by randomized smoothing.

        radius = σ Φ⁻¹(p),  p the one-sided Clopper–Pearson bound of the leading class's probability

    The leading class is chosen from `selection` samples, its probability bounded by `samples` others. A radius cannot exceed
    σ Φ⁻¹((1 − level)^(1/samples)): more samples certify farther. The model must have been trained with such noise to be any good.

    Args:
        model: the classifier; used in evaluation mode.
        x: points (N, ...).
        y: labels (N,), 0 and 1 or 0 to m − 1.
        sigma: standard deviation of the noise.
        samples: noisy copies per point for the bound.
        selection: noisy copies per point for the choice of the class.
        level: probability that the result for one point is right.
        threshold: class 1 where a scalar output is larger.
        output: which part of what the model returns is the output.
        batch: noisy copies that are evaluated at a time.
        seed: of the noise.

    Returns:
        `SmoothedMargins`: radii, decisions, and where it abstains.

    Raises:
        InputError: if an argument is of the wrong kind or out of range.
        ModelError: if the outputs do not fit the labels.

    Example:
        >>> model, x = torch.nn.Linear(4, 3), torch.rand(5, 4)
        >>> smoothed_margins(model, x, model(x).argmax(1), sigma=0.1, samples=200).certified_accuracy(0.05)
    """
    from scipy.stats import beta, norm

    check_weights(check_model(model))
    sigma, level = check_number(sigma, "sigma", 0, above=True), check_number(level, "level", 0.5, 1)
    threshold = check_number(threshold, "threshold")
    samples, selection, batch = (
        check_count(v, n) for v, n in ((samples, "samples"), (selection, "selection"), (batch, "batch"))
    )
    if level == 1:
        raise InputError("level: expected a probability below 1, since samples prove nothing for certain; got 1")
    x = check_points(x)
    generator = torch.Generator().manual_seed(check_seed(seed))
    with eval_mode(model), torch.no_grad():
        f = pick_output(model(x[:1]), output)
        classes = check_outputs(f, x[:1])
        labels = check_labels(y, x, classes)
        votes = _Votes(model, output, threshold, classes, sigma, batch, generator)
        chosen = torch.stack([votes(point, selection).argmax() for point in x]).cpu()
        count = torch.stack([votes(point, samples)[c] for point, c in zip(x, chosen)]).cpu().double()
    low = torch.from_numpy(np.nan_to_num(beta.ppf(1 - level, count.numpy(), samples - count.numpy() + 1)))
    sure = low > 0.5
    predicted = torch.where(sure, chosen, -1)
    radii = torch.where(
        sure & (chosen == labels.cpu()), torch.from_numpy(sigma * norm.ppf(low.clamp(min=0.5).numpy())), 0.0
    )
    return SmoothedMargins(radii, predicted, sigma, samples, level)


@dataclass(frozen=True)
class _Votes:
    """How often the model decides for each class around one point."""

    model: nn.Module
    output: Pick
    threshold: float
    classes: int
    sigma: float
    batch: int
    generator: torch.Generator

    def __call__(self, point: Tensor, samples: int) -> Tensor:
        votes = torch.zeros(max(2, self.classes), dtype=torch.long, device=point.device)
        for first in range(0, samples, self.batch):
            many = min(self.batch, samples - first)
            noise = torch.randn(many, *point.shape, generator=self.generator, dtype=point.dtype).to(point.device)
            f = pick_output(self.model(point + self.sigma * noise), self.output)
            decided = (f.reshape(many) > self.threshold).long() if self.classes == 1 else f.argmax(1)
            votes += torch.bincount(decided, minlength=len(votes))
        return votes
