"""An active test: adversarial examples are planted at known distances; a search that works finds them.

After Zimmermann, Brendel, Tramèr, Carlini ("Increasing confidence in adversarial robustness evaluations", NeurIPS 2022). The last
linear layer of the model is replaced, for each point, by one that separates random perturbations within the radius from a
single random one on its surface. The network before it, which is what may mask gradients, stays. The planted perturbation is
adversarial by construction; the search must find it or a smaller one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from excite.margin.problem import AdversarialPerturbations, Constraint, FeatureDecision, MarginProblem, column, features
from excite.margin.search import PLANS, CleanPoints, Noise, search, to_boundary

_INNER = 64  # random perturbations that must keep the decision
_WITHIN = 0.9  # largest radius of these, relative to that of the planted one
_TOLERANCE = 1.01
# Of n random directions in d dimensions the nearest to a given one has a cosine of about sqrt(2 ln(n) / d). With d at least 8 ln(n)
# it is at most 1/2; with fewer, only an oscillating function singles one perturbation out, and an honest search may miss it.
_MIN_INPUTS = math.ceil(8 * math.log(_INNER))


@dataclass(frozen=True)
class PlantedTest:
    """How the search did: points where an example could be planted, and those of them where it was not found."""

    planted: int
    unfound: int


def last_linear(model: nn.Module, x: Tensor) -> nn.Linear | None:
    """The linear layer that is called last and once, with one row per point; None if there is none."""
    calls: list[tuple[nn.Linear, Tensor]] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, args: calls.append((module, args[0])))
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        with torch.no_grad():
            model(x)
    finally:
        for hook in hooks:
            hook.remove()
    if not calls:
        return None
    layer, rows = calls[-1]
    called_once = sum(other is layer for other, _ in calls) == 1
    return layer if called_once and rows.dim() == 2 and len(rows) == len(x) else None


def planted_test(problem: MarginProblem, radius: Tensor, steps: int, noise: Noise) -> PlantedTest | None:
    """Plants one example at the distance `radius` (N,) of each point and searches for it.

    None if the model has no such layer, or too few inputs.
    """
    if problem.x[0].numel() < _MIN_INPUTS:
        return None
    layer = last_linear(problem.decision.model, problem.x[:2])
    if layer is None:
        return None
    planted, at, possible = _plant(problem, layer, radius, noise)
    rows = torch.nonzero(possible)[:, 0]
    if not len(rows):
        return PlantedTest(0, 0)
    perturbations = _find(planted.rows(rows), steps, noise)
    return PlantedTest(len(rows), int((perturbations.radius > _TOLERANCE * at[rows]).sum()))


def _find(problem: MarginProblem, steps: int, noise: Noise) -> AdversarialPerturbations:
    """Three searches as `margins` makes them, and the way to the boundary; nothing is known of where the examples are."""
    perturbations: AdversarialPerturbations | None = None
    clean = CleanPoints(*problem.decision.gradients(problem.x), problem.constraint.init_radius)
    for plan in PLANS[problem.constraint.norm][:3]:
        result = search(problem, plan, steps, clean, noise)
        if perturbations is None:
            perturbations = result
        perturbations.update(torch.arange(len(problem), device=problem.x.device), result.radius, result.d)
    assert perturbations is not None
    return to_boundary(problem, perturbations, rounds=8)


def _plant(
    problem: MarginProblem, layer: nn.Linear, radius: Tensor, noise: Noise
) -> tuple[MarginProblem, Tensor, Tensor]:
    """The problem with planted outputs, the distances of the planted examples, and where planting was possible (N,)."""
    decision, constraint, x = problem.decision, problem.constraint, problem.x
    features_at = partial(features, decision.model, layer, output=decision.output)
    with torch.no_grad():
        example, *inner_d = _random(constraint, x, [radius, *(size * radius for size in _sizes())], noise)
        inner = torch.stack([features_at(x + d) for d in inner_d], 1)
        centre, special = features_at(x), features_at(x + example)
        weight, scores, score = _separate(torch.cat([centre[:, None], inner], 1), special)
    max_score = scores.amax(1)
    # nearer to the planted example than to the others, so that few perturbations are adversarial
    threshold = max_score + 0.75 * (score - max_score)
    scale = (score - max_score).clamp_min(torch.finfo(x.dtype).tiny)
    possible = score - max_score > 1e-4 * scores.std(1).clamp_min(1e-12)
    zero = torch.zeros(len(x), dtype=torch.long, device=x.device)
    planted = FeatureDecision(
        decision.model,
        decision.output,
        0.0,
        zero,
        1,
        layer=layer,
        weight=weight / scale[:, None],
        bias=-threshold / scale,
    )
    return MarginProblem(planted, x, constraint), constraint.length(example), possible


def _sizes() -> list[float]:
    return [_WITHIN * (k + 1) / _INNER for k in range(_INNER)]


def _random(constraint: Constraint, x: Tensor, radii: Sequence[Tensor], noise: Noise) -> Tensor:
    """(k, N, ...): random perturbations of k sizes, each (N,), on the surface of the ball as far as the bounds allow."""
    repeated = constraint.rows(torch.arange(len(x), device=x.device).repeat(len(radii)))
    radius = torch.cat(list(radii))
    d = repeated.direction(torch.cat([noise(x.shape, x) for _ in radii])) * column(radius, x)
    return repeated.project(d, radius).view(len(radii), *x.shape)


def _separate(inner: Tensor, special: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (N, features) under which `special` (N, features) scores highest above `inner` (N, k, features), and the scores.

    Ridge regression with the kernel of the points: features are many, points few.
    """
    mean = inner.mean(1, keepdim=True)
    points = torch.cat([inner, special[:, None]], 1).double() - mean.double()
    size = points.square().sum(2).mean(1).clamp_min(torch.finfo(torch.float64).tiny)
    kernel = points @ points.transpose(1, 2)
    ridge = 1e-3 * size[:, None, None] * torch.eye(points.shape[1], dtype=points.dtype, device=points.device)
    target = torch.zeros(points.shape[:2], dtype=points.dtype, device=points.device)
    target[:, -1] = 1
    weight = (torch.linalg.solve(kernel + ridge, target[:, :, None]).transpose(1, 2) @ points)[:, 0]
    scores = (points @ weight[:, :, None])[:, :, 0] + (mean.double()[:, 0] * weight).sum(1, keepdim=True)
    weight, scores = weight.to(inner.dtype), scores.to(inner.dtype)
    return weight, scores[:, :-1], scores[:, -1]
