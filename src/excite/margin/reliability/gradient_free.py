"""Searches that use no gradient: they must not find anything smaller than those that do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from excite.margin.problem import AdversarialPerturbations, Constraint, MarginProblem, column, length, no_perturbations
from excite.margin.search import Noise, to_boundary


@dataclass(frozen=True)
class DatasetPoints:
    """Points towards which others are moved: (M, ...), and the classes (M,) that the model decides for there."""

    points: Tensor
    predicted: Tensor


def towards_points(
    problem: MarginProblem,
    targets: DatasetPoints,
    noise: Noise,
    nearest: int = 5,
    *,
    at: Tensor | None = None,
    lift: Callable[[Tensor], Tensor] | None = None,
) -> AdversarialPerturbations:
    """Adversarial perturbations that lead straight to dataset points, shrunk to the boundary.

    Of the points decided otherwise than the label the `nearest` are tried. If there are none, a few corners of the bounds or
    random directions. Where points are compared by something else than x, `at` is that (one row for each x, rows of the same
    for `targets`) and lift(change of it) the perturbation that makes the change.
    """
    x, constraint = problem.x, problem.constraint
    perturbations = no_perturbations(x)
    at = x if at is None else at
    apart = torch.cdist(at.flatten(1), targets.points.flatten(1), p=float(constraint.norm))
    apart = apart.masked_fill(targets.predicted[None, :] == problem.decision.labels[:, None], torch.inf)
    for k in range(min(nearest, len(targets.points))):
        distance, nearest_point = apart.kthvalue(k + 1, dim=1)
        index = torch.nonzero(torch.isfinite(distance))[:, 0]
        change = targets.points[nearest_point] - at
        _bisect(problem, constraint.clip(change if lift is None else lift(change)), index, perturbations)
    index = torch.nonzero(torch.isinf(perturbations.radius))[:, 0]
    for d in _corners(x, constraint, noise) if len(index) else ():
        _bisect(problem, constraint.clip(d), index, perturbations)
    return to_boundary(problem, perturbations)


def _bisect(problem: MarginProblem, d: Tensor, index: Tensor, perturbations: AdversarialPerturbations) -> None:
    """Bisect between the points `index` and their perturbations d, and take what is adversarial and smaller."""
    if not len(index):
        return
    problem, d = problem.rows(index), d[index]
    decision, x = problem.decision, problem.x
    low, high = x.new_zeros(len(x)), x.new_ones(len(x))
    for _ in range(10):
        middle = (low + high) / 2
        adversarial = decision.evaluate(x + column(middle, d) * d)[1]
        high, low = torch.where(adversarial, middle, high), torch.where(adversarial, low, middle)
    d = column(high, d) * d
    adversarial = decision.evaluate(x + d)[1]
    perturbations.update(index[adversarial], problem.constraint.length(d)[adversarial], d[adversarial])


def _corners(x: Tensor, constraint: Constraint, noise: Noise) -> Iterator[Tensor]:
    if constraint.low is not None and constraint.high is not None and not constraint.partial:
        yield constraint.low
        yield constraint.high
        for _ in range(4):
            yield torch.where(noise(x.shape, x) > 0, constraint.high, constraint.low)
        return
    for times in (1e-6, 1e-5, 1e-4, 1e-3):  # the largest radius is a million times the spread of the data
        far = constraint.direction(noise(x.shape, x)) * column(times * constraint.max_radius, x)
        yield far
        yield -far


def gradient_free_search(
    problem: MarginProblem, start: AdversarialPerturbations, noise: Noise, queries: int
) -> AdversarialPerturbations:
    """Shrink the perturbations of `start` by random changes of blocks of coordinates, `queries` per point.

    A candidate is the current perturbation with one random block of consecutive coordinates changed, brought to a
    radius a little below the best. It becomes current if its logit margin is not larger, and the best if it is adversarial.
    """
    index = torch.nonzero(torch.isfinite(start.radius))[:, 0]
    best = AdversarialPerturbations(start.radius.clone(), start.d.clone())
    if not len(index):
        return best
    problem = problem.rows(index)
    decision, constraint, x = problem.decision, problem.constraint, problem.x
    d, radius = start.d[index].clone(), start.radius[index].clone()
    logit_margin = torch.full_like(radius, torch.inf)
    shrink = torch.full_like(radius, 0.2)
    tries = torch.zeros_like(radius)
    for query in range(queries):
        fraction = max(0.5 * 0.02 ** (query / queries), 1.5 / x[0].numel())
        target = radius * (1 - shrink)
        candidate = constraint.project(_changed(d, target, fraction, constraint, noise), target)
        value, adversarial = decision.evaluate(x + candidate)
        # Rounding in `project` may leave a norm a hair above the target, never above the radius.
        best.update(index[adversarial], constraint.length(candidate)[adversarial], candidate[adversarial])
        better = adversarial | (value <= logit_margin)
        d = torch.where(column(better, d), candidate, d)
        logit_margin = torch.where(adversarial, torch.inf, torch.where(better, value, logit_margin))
        radius = torch.where(adversarial, target, radius)
        tries = torch.where(adversarial, 0, tries + 1)
        shrink = torch.where(adversarial, (shrink * 1.5).clamp(max=0.3), shrink)
        stuck = tries >= 12  # aim less low, from the last adversarial perturbation
        shrink = torch.where(stuck, (shrink / 2).clamp(min=1e-3), shrink)
        d = torch.where(column(stuck, d), best.d[index], d)
        logit_margin, tries = torch.where(stuck, torch.inf, logit_margin), torch.where(stuck, 0, tries)
    return best


def _changed(d: Tensor, radius: Tensor, fraction: float, constraint: Constraint, noise: Noise) -> Tensor:
    """d with a block of consecutive coordinates moved: to a corner of the ball ("inf"), by noise or to zero ("2")."""
    flat = d.flatten(1)
    size = flat.shape[1]
    span = max(1, round(fraction * size))
    draws = noise(torch.Size((len(d), 3)), d)
    begin = ((draws[:, 0] * 7919.0) % 1.0 * (size - span + 1)).long()[:, None]
    position = torch.arange(size, device=d.device)[None]
    block = (position >= begin) & (position < begin + span)
    if constraint.norm == "inf":
        # one sign for the whole block, or each coordinate turned round
        corner = torch.where(draws[:, 1:2] > 0, draws[:, 2:].sign() * radius[:, None], -flat)
        return torch.where(block, corner, flat).reshape(d.shape)
    change = noise(flat.shape, flat)
    change = change * block
    change = change * (radius / length(change, "2").clamp_min(1e-12))[:, None] * draws[:, 2:].abs() * fraction**0.5
    return torch.where(draws[:, 1:2] > 0, flat + change, torch.where(block, 0.5 * flat, flat)).reshape(d.shape)
