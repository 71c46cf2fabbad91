"""Minimum-norm search: the smallest perturbation that changes a decision, by signed or normalized gradient steps.

Each point has a radius of its own. Where the point is broken the radius shrinks, where it is not it grows, as in the
fast minimum-norm attack (Pintor, Roli, Brendel, Biggio, NeurIPS 2021). What differs here:
- the change of the radius is the distance |slack| / ‖gradient‖_dual to the boundary to first order, between an annealed
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
from excite.margin.constraints import Room, column
from excite.margin.problem import Decision

Noise = Callable[[torch.Size, Tensor], Tensor]


@dataclass(frozen=True)
class Plan:
    """Settings of one search; pairs go from the first step to the last along cos^power.

    stride: length of a step relative to the radius. memory: momentum of the normalized gradients.
    most, least: bounds on the relative change of the radius in a step. growth: the same before the point first breaks.
    scatter: the first step starts from a random corner of the ball, times this. graded: steps keep the proportions of the
    gradient's coordinates, also for the norm "inf", where the steepest step keeps only their signs.
    """

    stride: tuple[float, float]
    memory: float
    most: tuple[float, float]
    least: tuple[float, float]
    growth: float
    power: float
    scatter: float
    graded: bool = False


# Plans that fail on different points, which is worth more than more steps: the independent searches go through them in
# turn. Found by random search over some 450 settings, on convolutional networks trained plainly, with excited inputs
# and with excited layers, three of which mask their gradients, and on small networks for digits.
PLANS: dict[Norm, tuple[Plan, ...]] = {
    "inf": (
        Plan((1.5, 0.002), 0.0, (0.5, 0.03), (0.003, 0.002), 0.5, 0.7, 1.0),
        Plan((1.5, 0.01), 0.4, (0.8, 0.002), (0.01, 0.001), 1.0, 0.5, 0.0),
        Plan((0.5, 0.005), 0.6, (0.5, 0.01), (0.01, 0.001), 1.0, 0.7, 0.5, graded=True),
        Plan((1.0, 0.005), 0.6, (0.5, 0.01), (0.01, 0.001), 1.0, 0.7, 1.0),
    ),
    "2": (
        Plan((2.0, 0.01), 0.0, (0.5, 0.002), (0.01, 0.001), 0.25, 1.0, 1.0),
        Plan((2.0, 0.005), 0.4, (0.8, 0.002), (0.001, 0.001), 1.0, 0.7, 0.0),
        Plan((1.5, 0.02), 0.0, (0.2, 0.002), (0.01, 0.0003), 0.5, 0.5, 0.5),
        Plan((1.0, 0.005), 0.6, (0.5, 0.01), (0.01, 0.001), 1.0, 0.7, 1.0),
    ),
}

# Small steps around the best perturbation of all searches.
POLISH = Plan((0.1, 0.002), 0.6, (0.02, 0.002), (0.002, 0.0003), 1.0, 1.0, 0.0)


@dataclass
class Found:
    """The smallest breaking perturbations so far: `radius` (N,) is inf and `d` zero where there is none."""

    radius: Tensor
    d: Tensor

    def rows(self, index: Tensor) -> Found:
        return Found(self.radius[index], self.d[index])

    def take(self, index: Tensor, radius: Tensor, d: Tensor) -> None:
        """Keep those of `radius`, `d` for the points `index` that are smaller."""
        better = radius < self.radius[index]
        chosen = index[better]
        self.radius[chosen] = radius[better]
        self.d[chosen] = d[better]


def nothing(x: Tensor) -> Found:
    return Found(torch.full((len(x),), math.inf, dtype=x.dtype, device=x.device), torch.zeros_like(x))


@dataclass(frozen=True)
class Opening:
    """The clean points: slack, broken (N,), the gradient of the slack, and a cap on the first radius (N,)."""

    slack: Tensor
    broken: Tensor
    gradient: Tensor
    cap: Tensor

    def rows(self, index: Tensor) -> Opening:
        return Opening(self.slack[index], self.broken[index], self.gradient[index], self.cap[index])


def search(
    decision: Decision, x: Tensor, room: Room, plan: Plan, steps: int, begin: Opening | Tensor, noise: Noise
) -> Found:
    """The smallest perturbation met in `steps` steps from the clean points, or from the perturbations `begin`.

    Points leave the batch when they are done: where the radius is what the linearization says is the least possible.
    """
    best = nothing(x)
    opening = begin if isinstance(begin, Opening) else None
    state = _State(decision, x, room, torch.zeros_like(x) if opening else begin)  # type: ignore[arg-type]
    for step in range(steps):
        if step == 0 and opening is not None:
            state.update(best, plan, 0.0, opening.slack, opening.broken, opening.gradient, noise, opening.cap)
        else:
            slack, broken, gradient = state.decision.slope(state.x + state.d)
            state.update(best, plan, step / steps, slack, broken, gradient, noise)
        state.leave()
        if not len(state.index):
            break
    return best


class _State:
    """The points still in the search: one row each."""

    def __init__(self, decision: Decision, x: Tensor, room: Room, d: Tensor):
        self.decision, self.x, self.room, self.d = decision, x, room, d
        self.index = torch.arange(len(x), device=x.device)
        self.radius = room.length(d)
        self.best = torch.full_like(self.radius, math.inf)
        self.momentum: Tensor | None = None
        self.settled = torch.zeros(len(x), dtype=torch.long, device=x.device)

    def update(
        self,
        best: Found,
        plan: Plan,
        time: float,
        slack: Tensor,
        broken: Tensor,
        gradient: Tensor,
        noise: Noise,
        cap: Tensor | None = None,
    ) -> None:
        room, d = self.room, self.d
        fade = ((1 + math.cos(math.pi * time)) / 2) ** plan.power
        stride, most, least = (last + (begin - last) * fade for begin, last in (plan.stride, plan.most, plan.least))
        size = room.length(d)
        better = broken & (size < self.best)
        best.take(self.index[better], size[better], d[better])
        self.best = torch.where(better, size, self.best)
        known = torch.isfinite(self.best)

        gradient = room.open(gradient, d)
        steep = room.slope(gradient)
        flat = steep <= torch.finfo(steep.dtype).tiny
        if bool(flat.any()):
            gradient = torch.where(column(flat, gradient), noise(gradient.shape, gradient), gradient)
        distance = torch.where(flat, math.inf, slack.abs() / steep)  # to the boundary, to first order
        # The least radius at which the linearization breaks: (slack − gradient·d) / ‖gradient‖_dual.
        linear = (slack - (gradient * d).flatten(1).sum(1)) / steep
        self.settled = torch.where(
            known & ~flat & ((self.best - linear).abs() <= 0.003 * self.best), self.settled + 1, 0
        )

        now = torch.minimum(self.radius, self.best)
        change = torch.maximum(torch.minimum(distance, most * now), least * now)
        # A little past the estimate: exactly on the boundary of a linear model nothing would ever break.
        most_growth = plan.growth * now if cap is None else cap
        grown = torch.maximum(torch.minimum(distance * (1 + least), most_growth), least * now)
        radius = torch.where(broken, now - change, now + torch.where(known, change, grown))
        self.radius = torch.minimum(torch.minimum(radius, self.best * (1 - least)), room.reach)

        if plan.memory:
            scaled = gradient / column(room.slope(gradient), gradient)
            self.momentum = scaled if self.momentum is None else plan.memory * self.momentum + scaled
            gradient = self.momentum
        if cap is not None and plan.scatter:
            # not beyond a tenth of the room: a first estimate that large says nothing
            d = room.direction(noise(d.shape, d)) * column(
                plan.scatter * torch.minimum(self.radius, room.reach / 10), d
            )
        way = room.graded(gradient) if plan.graded else room.direction(gradient)
        d = d - way * column(stride * self.radius, d)
        self.d = room.fit(d, self.radius)

    def leave(self) -> None:
        """Drop the points that are done, when they are enough to be worth the copy."""
        done = self.settled >= 3
        if int(done.sum()) * 10 < len(done):
            return
        stay = torch.nonzero(~done)[:, 0]
        for name in ("index", "x", "d", "radius", "best", "settled"):
            setattr(self, name, getattr(self, name)[stay])
        self.momentum = None if self.momentum is None else self.momentum[stay]
        self.room, self.decision = self.room.rows(stay), self.decision.rows(stay)


def to_boundary(decision: Decision, x: Tensor, room: Room, found: Found, rounds: int = 12) -> Found:
    """Shrink each breaking perturbation along its path to zero, as far as a bracketing line search takes it.

    Alternates the secant of the slack, exact for linear models, with bisection, which also serves steps and plateaus.
    """
    index = torch.nonzero(torch.isfinite(found.radius) & (found.radius > 0))[:, 0]
    result = Found(found.radius.clone(), found.d.clone())
    if not len(index):
        return result
    decision, room, x, d = decision.rows(index), room.rows(index), x[index], found.d[index]
    high = found.radius[index]
    low = torch.zeros_like(high)
    above, below = decision.look(x)[0], decision.look(x + d)[0]  # slack at low and at high
    for i in range(rounds):
        width = high - low
        part = (above / (above - below)).clamp(0.02, 0.98) if i % 3 < 2 else torch.full_like(high, 0.5)
        # Overshooting the secant a little on each side in turn moves both ends of the bracket.
        part = torch.nan_to_num(part + (1e-3 if i % 3 == 0 else -1e-3), 0.5)
        middle = low + width * part
        cut = room.shrunk(d, middle)
        slack, broken = decision.look(x + cut)
        result.take(index[broken], room.length(cut)[broken], cut[broken])
        high, below = torch.where(broken, middle, high), torch.where(broken, slack, below)
        low, above = torch.where(broken, low, middle), torch.where(broken, above, slack)
    return result
