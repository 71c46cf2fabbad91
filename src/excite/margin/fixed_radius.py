"""Robust accuracy: the share of points that stay right however they are perturbed, as far as an attack can tell.

The attack is the search of adversarial training on the trained model: projected steps up the margin loss from random
starts. What it breaks is broken; what it does not break may still be, so the share is an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.checks import (
    Bounds,
    check_count,
    check_model,
    check_numbers,
    check_seed,
    check_tensor,
    model_errors,
    shown,
)
from excite._core.preserve import device_of, eval_mode
from excite._core.randomness import own_randomness
from excite.errors import InputError
from excite.excitation import AdversarialTraining


@model_errors
def broken_at(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    radii: Sequence[float],
    *,
    norm: str | float = "inf",
    bounds: Bounds | None = None,
    classes: int | None = None,
    threshold: float | None = None,
    steps: int = 20,
    restarts: int = 3,
    batch: int = 1000,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> Tensor:
    """For each point the smallest of `radii` at which one of `restarts` attacks of `steps` steps gets it wrong, (N,).

    Minus infinity for points that are wrong unperturbed, infinity for those that no attack breaks. A point is attacked with
    the smallest radius first and left alone once it is broken. The model is used in evaluation mode and left as it was;
    random starts come from `seed`. `classes` and `threshold` say how outputs decide, as in `AdversarialTraining`.
    """
    check_model(model)
    restarts, batch, seed = check_count(restarts, "restarts"), check_count(batch, "batch"), check_seed(seed)
    radii = check_numbers(radii, "radii", 0)
    if not radii or any(a > b for a, b in pairwise(radii)):
        raise InputError(f"radii: expected numbers in ascending order; got {shown(radii)}")
    check_tensor(x, "points"), check_tensor(y, "labels", 1, 2, floating=False)
    if x.dim() == 0 or not len(x) or y.shape not in ((len(x),), (len(x), 1)):
        raise InputError(f"expected as many labels as points, at least one; got {tuple(x.shape)} and {tuple(y.shape)}")
    device = device_of(model)
    attacks = [
        AdversarialTraining(model, r, norm, steps, None, True, "margin", classes, bounds, threshold) for r in radii
    ]
    found = torch.full((len(x),), -torch.inf, dtype=torch.float64)
    parts = list(zip(x.split(batch), y.split(batch), torch.arange(len(x)).split(batch)))
    with eval_mode(model), own_randomness(seed, device):
        for done, (points, labels, at) in enumerate(parts, 1):
            points, labels = points.to(device), labels.to(device).reshape(-1)
            stands = attacks[0].predict(points) == labels
            for attack, radius in zip(attacks, radii):
                for _ in range(restarts if radius else 0):
                    points, labels, at, stands = points[stands], labels[stands], at[stands.cpu()], stands[stands]
                    if not len(points):
                        break
                    moved = points + attack.perturbations(points, labels)
                    if bounds is not None:
                        moved = moved.clamp(*bounds)  # rounding may lead out by one unit
                    stands = attack.predict(moved) == labels
                    found[at[~stands.cpu()]] = radius
            found[at[stands.cpu()]] = torch.inf
            if progress is not None:
                progress(done / len(parts))
    return found


def robust_accuracy(model: nn.Module, x: Tensor, y: Tensor, radii: Sequence[float], **options: Any) -> list[float]:
    """For each radius the share of points that are right and stay right under attack; `options` as in `broken_at`."""
    radii = check_numbers(radii, "radii", 0)
    found = broken_at(model, x, y, radii, **options)
    return [float((found > radius).double().mean()) for radius in radii]
