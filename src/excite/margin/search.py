"""Minimum-norm search: the smallest perturbation that changes a decision, by signed or normalized gradient steps.

Each point has a radius of its own. Where the perturbed point is adversarial the radius shrinks, where it is not it grows, as
in the fast minimum-norm attack (Pintor, Roli, Brendel, Biggio, NeurIPS 2021). What differs here:
- the change of the radius is the distance |logit margin| / ‖gradient‖_dual to the boundary to first order, between an annealed
  least and largest relative change, instead of a fixed percentage;
- steps are steepest in the norm of the search (signs for "inf", except in one plan) and relative to the radius, from
  more than the whole radius, which jumps between corners of the ball, down to a fraction of a percent of it;
- where the gradient is exactly zero the step goes in a random direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from excite._core.checks import Norm
from excite.margin.problem import AdversarialPerturbations, MarginProblem, column, no_perturbations

Noise = Callable[[torch.Size, Tensor], Tensor]


@dataclass(frozen=True)
class SearchPlan:
    """Settings of one search; pairs go from the first step to the last along cos^power.

    step_size: length of a step relative to the radius. momentum: of the normalized gradients.
    max_change, min_change: bounds on the relative change of the radius in a step. growth: the largest before the point is
    first adversarial. random_start: the first step starts from a random corner of the ball, times this. proportional: steps
    keep the proportions of the gradient's coordinates, also for the norm "inf", where the steepest step keeps only their signs.
    vertex: a step goes this fraction of the way to the perturbation within radius and bounds along which the gradient falls
    most (conditional gradients), for the norm "1", where it has few coordinates and those at their bounds.
    """

    step_size: tuple[float, float]
    momentum: float
    max_change: tuple[float, float]
    min_change: tuple[float, float]
    growth: float
    power: float
    random_start: float
    proportional: bool = False
    vertex: bool = False


# Plans that fail on different points, which is worth more than more steps: the independent searches go through them in
# turn. Found by random search over some 450 settings, on convolutional networks trained plainly, with excited inputs
# and with excited layers, three of which mask their gradients, and on small networks for digits.
PLANS: dict[Norm, tuple[SearchPlan, ...]] = {
    "inf": (
        SearchPlan((1.5, 0.002), 0.0, (0.5, 0.03), (0.003, 0.002), 0.5, 0.7, 1.0),
        SearchPlan((1.5, 0.01), 0.4, (0.8, 0.002), (0.01, 0.001), 1.0, 0.5, 0.0),
        SearchPlan((0.5, 0.005), 0.6, (0.5, 0.01), (0.01, 0.001), 1.0, 0.7, 0.5, proportional=True),
        SearchPlan((1.0, 0.005), 0.6, (0.5, 0.01), (0.01, 0.001), 1.0, 0.7, 1.0),
    ),
    "2": (
        SearchPlan((2.0, 0.01), 0.0, (0.5, 0.002), (0.01, 0.001), 0.25, 1.0, 1.0),
        SearchPlan((2.0, 0.005), 0.4, (0.8, 0.002), (0.001, 0.001), 1.0, 0.7, 0.0),
        SearchPlan((1.5, 0.02), 0.0, (0.2, 0.002), (0.01, 0.0003), 0.5, 0.5, 0.5),
        SearchPlan((1.0, 0.005), 0.6, (0.5, 0.01), (0.01, 0.001), 1.0, 0.7, 1.0),
    ),
    "1": (
        SearchPlan((1.0, 0.01), 0.0, (0.5, 0.002), (0.01, 0.001), 0.25, 1.0, 1.0, vertex=True),
        SearchPlan((1.0, 0.005), 0.4, (0.8, 0.002), (0.001, 0.001), 1.0, 0.7, 0.0, vertex=True),
        SearchPlan((1.0, 0.02), 0.0, (0.2, 0.002), (0.01, 0.0003), 0.5, 0.5, 0.5, vertex=True),
        SearchPlan((1.0, 0.005), 0.6, (0.5, 0.01), (0.01, 0.001), 1.0, 0.7, 1.0, vertex=True),
    ),
}

# Small steps around the best perturbation of all searches.
POLISH: dict[Norm, SearchPlan] = {
    "inf": SearchPlan((0.1, 0.002), 0.6, (0.02, 0.002), (0.002, 0.0003), 1.0, 1.0, 0.0),
    "2": SearchPlan((0.1, 0.002), 0.6, (0.02, 0.002), (0.002, 0.0003), 1.0, 1.0, 0.0),
    "1": SearchPlan((0.3, 0.003), 0.6, (0.02, 0.002), (0.002, 0.0003), 1.0, 1.0, 0.0, vertex=True),
}

# Towards one class, within the best radius so far.
TARGETED: dict[Norm, SearchPlan] = {
    "inf": SearchPlan((2.0, 0.01), 0.0, (0.2, 0.005), (0.005, 0.001), 1.0, 0.7, 0.0),
    "2": SearchPlan((2.0, 0.01), 0.0, (0.2, 0.005), (0.005, 0.001), 1.0, 0.7, 0.0),
    "1": SearchPlan((0.5, 0.01), 0.0, (0.2, 0.005), (0.005, 0.001), 1.0, 0.7, 0.0, vertex=True),
}
_FARTHER = 1.1  # a class is out of reach where the linearization puts it this many times farther away than the best,
_HOPELESS = 4  # so many steps in a row


@dataclass(frozen=True)
class CleanPoints:
    """The unperturbed points: logit margin, adversarial (N,), the gradient of the logit margin, and a cap on the first radius (N,)."""

    logit_margin: Tensor
    adversarial: Tensor
    gradient: Tensor
    init_radius: Tensor


def search(
    problem: MarginProblem,
    plan: SearchPlan,
    steps: int,
    begin: CleanPoints | Tensor,
    noise: Noise,
    below: Tensor | None = None,
) -> AdversarialPerturbations:
    """The smallest adversarial perturbation met in `steps` steps from the clean points, or from the perturbations `begin`.

    Points leave the batch when they have converged: where the radius is what the linearization says is the least possible.
    With `below` (N,) only smaller perturbations are of interest: the search stays within these radii, and points also leave
    where the linearization keeps saying that there is none.
    """
    best = no_perturbations(problem.x)
    state = _State(problem, torch.zeros_like(problem.x) if isinstance(begin, CleanPoints) else begin, below)
    for step in range(steps):
        if step == 0 and isinstance(begin, CleanPoints):
            values, init_radius = (begin.logit_margin, begin.adversarial, begin.gradient), begin.init_radius
        else:
            values, init_radius = state.problem.decision.gradients(state.problem.x + state.d), None
        state.update(best, plan, step / steps, *values, noise, init_radius)
        converged = (state.agreements >= 3) | (state.hopeless >= _HOPELESS)
        if int(converged.sum()) * 10 >= len(converged):  # enough of them to be worth the copy
            state.keep_rows(torch.nonzero(~converged)[:, 0])
        if not len(state.index):
            break
    return best


class _State:
    """The points still in the search: one row each."""

    def __init__(self, problem: MarginProblem, d: Tensor, below: Tensor | None = None):
        self.problem, self.d = problem, d
        self.index = torch.arange(len(problem.x), device=d.device)
        self.radius = problem.constraint.length(d)
        self.best = torch.full_like(self.radius, math.inf) if below is None else below.clone()
        self.capped = below is not None
        self.momentum: Tensor | None = None
        self.agreements = torch.zeros(len(d), dtype=torch.long, device=d.device)  # steps in a row
        self.hopeless = torch.zeros_like(self.agreements)  # steps in a row

    def update(
        self,
        best: AdversarialPerturbations,
        plan: SearchPlan,
        time: float,
        logit_margin: Tensor,
        adversarial: Tensor,
        gradient: Tensor,
        noise: Noise,
        init_radius: Tensor | None = None,
    ) -> None:
        """One step, with what the model says at the current perturbations; `init_radius` only in the first, from zero."""
        constraint, d = self.problem.constraint, self.d
        fade = ((1 + math.cos(math.pi * time)) / 2) ** plan.power
        step_size, max_change, min_change = (
            last + (first - last) * fade for first, last in (plan.step_size, plan.max_change, plan.min_change)
        )
        size = constraint.length(d)
        better = adversarial & (size < self.best)
        best.update(self.index[better], size[better], d[better])
        self.best = torch.where(better, size, self.best)
        known = torch.isfinite(self.best)

        gradient = constraint.active(gradient, d)
        slope = constraint.dual_norm(gradient)
        flat = slope <= torch.finfo(slope.dtype).tiny
        if bool(flat.any()):
            gradient = torch.where(column(flat, gradient), noise(gradient.shape, gradient), gradient)
        distance = torch.where(flat, math.inf, logit_margin.abs() / slope)  # to the boundary, to first order
        # The least radius at which the linearization is adversarial: (logit margin − gradient·d) / ‖gradient‖_dual.
        linear = (logit_margin - (gradient * d).flatten(1).sum(1)) / slope
        agrees = known & ~flat & ((self.best - linear).abs() <= 0.003 * self.best)
        self.agreements = torch.where(agrees, self.agreements + 1, 0)
        if self.capped:
            self.hopeless = torch.where(linear > _FARTHER * self.best, self.hopeless + 1, 0)

        radius = torch.minimum(self.radius, self.best)
        change = torch.maximum(torch.minimum(distance, max_change * radius), min_change * radius)
        # A little past the estimate: exactly on the boundary of a linear model no point would ever be adversarial.
        max_growth = plan.growth * radius if init_radius is None else init_radius
        grown = torch.maximum(torch.minimum(distance * (1 + min_change), max_growth), min_change * radius)
        radius = torch.where(adversarial, radius - change, radius + torch.where(known, change, grown))
        self.radius = torch.minimum(torch.minimum(radius, self.best * (1 - min_change)), constraint.max_radius)

        if plan.momentum:
            size = constraint.dual_norm(gradient) if bool(flat.any()) else slope
            normalized = gradient / column(size, gradient)
            self.momentum = normalized if self.momentum is None else plan.momentum * self.momentum + normalized
            gradient = self.momentum
        if init_radius is not None and plan.random_start:
            # not beyond a tenth of the largest radius: a first estimate that large says nothing
            start = plan.random_start * torch.minimum(self.radius, constraint.max_radius / 10)
            d = constraint.direction(noise(d.shape, d)) * column(start, d)
        if plan.vertex:
            d = constraint.project(d, self.radius)
            self.d = constraint.clip(d + step_size * (constraint.vertex(gradient, self.radius) - d))
        else:
            descent = constraint.scaled(gradient) if plan.proportional else constraint.direction(gradient)
            self.d = constraint.project(d - descent * column(step_size * self.radius, d), self.radius)

    def keep_rows(self, rows: Tensor) -> None:
        """Drop the other points."""
        for name in ("index", "d", "radius", "best", "agreements", "hopeless"):
            setattr(self, name, getattr(self, name)[rows])
        self.momentum = None if self.momentum is None else self.momentum[rows]
        self.problem = self.problem.rows(rows)


def to_boundary(
    problem: MarginProblem, perturbations: AdversarialPerturbations, rounds: int = 12
) -> AdversarialPerturbations:
    """Shrink each adversarial perturbation along its path to zero, as far as a bracketing line search takes it.

    Alternates the secant of the logit margin, exact for linear models, with bisection, which also serves steps and plateaus.
    """
    index = torch.nonzero(torch.isfinite(perturbations.radius) & (perturbations.radius > 0))[:, 0]
    result = AdversarialPerturbations(perturbations.radius.clone(), perturbations.d.clone())
    if not len(index):
        return result
    problem, d = problem.rows(index), perturbations.d[index]
    decision, constraint, x = problem.decision, problem.constraint, problem.x
    high = perturbations.radius[index]
    low = torch.zeros_like(high)
    above, below = decision.evaluate(x)[0], decision.evaluate(x + d)[0]  # logit margins at low and at high
    for i in range(rounds):
        width = high - low
        fraction = (above / (above - below)).clamp(0.02, 0.98) if i % 3 < 2 else torch.full_like(high, 0.5)
        # Overshooting the secant a little on each side in turn moves both ends of the bracket.
        fraction = torch.nan_to_num(fraction + (1e-3 if i % 3 == 0 else -1e-3), 0.5)
        middle = low + width * fraction
        shorter = constraint.shrink(d, middle)
        logit_margin, adversarial = decision.evaluate(x + shorter)
        result.update(index[adversarial], constraint.length(shorter)[adversarial], shorter[adversarial])
        high, below = torch.where(adversarial, middle, high), torch.where(adversarial, logit_margin, below)
        low, above = torch.where(adversarial, low, middle), torch.where(adversarial, above, logit_margin)
    return result
