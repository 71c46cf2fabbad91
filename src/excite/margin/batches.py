"""All points of one call of `margins`, searched in batches: the independent searches, and what follows them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from excite.margin.constraints import Room
from excite.margin.problem import Decision
from excite.margin.gradient_free import from_others
from excite.margin.search import PLANS, POLISH, Found, Noise, Opening, nothing, search, to_boundary

_CLASSES = 10  # nearest classes whose first-order distance is worked out
_POOL = 1000  # data points towards which points may be moved


@dataclass
class Task:
    """The points x (N, ...) with their clean outputs f, and what the searches found out about them."""

    decision: Decision
    x: Tensor
    room: Room
    f: Tensor
    size: int
    steps: int
    seed: int
    runs: list[Tensor] = field(default_factory=list)  # radii (N,) found by each independent search
    start: Found | None = None  # perturbations known beforehand: one more search begins there

    def __post_init__(self) -> None:
        self.noise = _noise(self.seed)
        self.right = self.decision.chosen(self.f) == self.decision.labels
        self.estimate = self.x.new_zeros(len(self.x))  # distance to the boundary by the gradient at the clean point
        self.lost = torch.zeros_like(self.right)  # not broken by gradients, but on the way to another point

    def _batches(self, mask: Tensor) -> tuple[Tensor, ...]:
        """The numbers of the points where `mask` holds, in batches; none where it holds nowhere."""
        points = torch.nonzero(mask)[:, 0]
        return points.split(self.size) if len(points) else ()

    def run(self, restarts: int, progress: Callable[[int, int], None] | None = None) -> Found:
        found = nothing(self.x)
        found.radius[~self.right] = 0
        self.runs = [torch.full_like(found.radius, math.inf) for _ in range(restarts)]
        done = 0
        for index in self._batches(self.right):
            x, room, decision = self.x[index], self.room.rows(index), self.decision.rows(index)
            ways = [_opened(choice, x, room.cap) for choice in _choices(decision, x, room, self.f[index])]
            slope = room.slope(room.open(ways[0][1].gradient, torch.zeros_like(x)))
            self.estimate[index] = ways[0][1].slack / slope
            for k in range(restarts):
                radii = self._search(k, index, x, room, *ways[k % len(ways)])
                found.take(index, radii.radius, radii.d)
                self.runs[k][index] = radii.radius
                done += len(index)
                if progress is not None:
                    progress(done, restarts * int(self.right.sum()))
        self._continue(found)
        self._recover(found)
        for index in self._batches(self.right & torch.isfinite(found.radius)):
            x, room, decision = self.x[index], self.room.rows(index), self.decision.rows(index)
            near = search(decision, x, room, POLISH, max(2, 2 * self.steps // 5), found.d[index], self.noise)
            found.take(index, near.radius, near.d)
            line = to_boundary(decision, x, room, found.rows(index), rounds=8)
            found.take(index, line.radius, line.d)
        return found

    def _search(self, k: int, index: Tensor, x: Tensor, room: Room, decision: Decision, opening: Opening) -> Found:
        """The k-th independent search: the plans in turn, every fourth from the way to a point decided otherwise.

        The others all start along the gradient at the point, which in few dimensions may lead to the wrong side.
        """
        plans = PLANS[room.norm]
        plan = plans[k % len(plans)]
        if k % 4 == 3:
            start = self.others(decision, index, nearest=2)
            if bool(torch.isfinite(start.radius).all()):
                again = search(decision, x, room, plan, self.steps, start.d, self.noise)
                again.take(torch.arange(len(x), device=x.device), start.radius, start.d)
                return again
        return search(
            decision, x, room, replace(plan, scatter=1.0) if k >= len(plans) else plan, self.steps, opening, self.noise
        )

    def _continue(self, found: Found) -> None:
        """Search on from perturbations that were known beforehand."""
        if self.start is None:
            return
        for index in self._batches(self.right & torch.isfinite(self.start.radius)):
            x, room, decision, start = (
                self.x[index],
                self.room.rows(index),
                self.decision.rows(index),
                self.start.rows(index),
            )
            broken = decision.look(x + start.d)[1]
            found.take(index[broken], start.radius[broken], start.d[broken])
            near = search(decision, x, room, PLANS[room.norm][1], self.steps, start.d, self.noise)
            found.take(index, near.radius, near.d)

    def _recover(self, found: Found) -> None:
        """Points that the search did not break: start again from the way to points decided otherwise."""
        for index in self._batches(torch.isinf(found.radius)):
            x, room, decision = self.x[index], self.room.rows(index), self.decision.rows(index)
            start = self.others(decision, index)
            found.take(index, start.radius, start.d)
            broken = torch.isfinite(start.radius)
            self.lost[index] = broken
            index, rows = index[broken], torch.nonzero(broken)[:, 0]
            if len(index):
                again = search(
                    decision.rows(rows),
                    x[rows],
                    room.rows(rows),
                    PLANS[room.norm][0],
                    self.steps,
                    start.d[rows],
                    self.noise,
                )
                found.take(index, again.radius, again.d)

    def others(self, decision: Decision, index: Tensor, nearest: int = 5) -> Found:
        """Perturbations of the points `index` that lead to data points decided otherwise, as far as the boundary."""
        pool, chosen = self.x[:: self.every], self.decision.chosen(self.f[:: self.every])
        return from_others(decision, self.x[index], self.room.rows(index), pool, chosen, self.noise, nearest)

    def shaped(self, d: Tensor) -> Tensor | dict[str, Tensor]:
        """The perturbations as users get them."""
        return d

    @property
    def every(self) -> int:
        """Every how manyth data point others may be moved to: at most `_POOL`, evenly taken."""
        return max(1, math.ceil(len(self.x) / _POOL))

    def firm(self, found: Found) -> None:
        """Make perturbations break the points by more than rounding, which differs with the size of the batch."""
        # A model may work in single precision also for inputs in double precision.
        types = {self.x.dtype, self.f.dtype, *(p.dtype for p in self.decision.model.parameters())}
        epsilon = torch.finfo(torch.float32 if torch.float32 in types else self.x.dtype).eps
        for index in self._batches(self.right & torch.isfinite(found.radius)):
            f = self.f[index]
            size = f.abs() if f.dim() == 1 else f.abs().amax(1)
            rounding = 64 * epsilon * (size + abs(self.decision.threshold) * (f.dim() == 1))
            for more in (0, 8, 32, 128, 512, 2048):
                x, room, decision = self.x[index], self.room.rows(index), self.decision.rows(index)
                d = room.clip(found.d[index] * (1 + more * epsilon))
                slack, broken = decision.look(x + d)
                clear = broken & (slack <= -rounding)
                done = index[clear]
                found.d[done] = d[clear]
                found.radius[done] = room.length(d)[clear]
                index, rounding = index[~clear], rounding[~clear]
                if not len(index):
                    break


def batch_size(x: Tensor) -> int:
    """Small enough for the caches of a CPU, large enough to keep a GPU busy."""
    most = 2**19 if x.device.type == "cpu" else 2**24
    return min(max(most // x[0].numel(), 32), 4096)


def default_restarts(x: Tensor) -> int:
    return 12 if x[0].numel() < 1024 else 3


def _noise(seed: int) -> Noise:
    """Standard normal draws from a generator of our own, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return lambda shape, like: torch.randn(shape, generator=generator, dtype=like.dtype).to(like.device)


def _opened(decision: Decision, x: Tensor, cap: Tensor) -> tuple[Decision, Opening]:
    return decision, Opening(*decision.slope(x), cap)


def _choices(decision: Decision, x: Tensor, room: Room, f: Tensor) -> list[Decision]:
    """Which of many classes to steer towards: the nearest to first order in one search, the likeliest in the next.

    Once a point is broken it tends to stay with the class it fell to, so that the first choice matters.
    """
    if decision.classes <= 2:
        return [decision]
    others = f.scatter(1, decision.labels[:, None], -math.inf)
    likeliest = others.topk(min(_CLASSES, decision.classes - 1), dim=1).indices
    zero = torch.zeros_like(x)
    steep = torch.stack([room.slope(room.open(g, zero)) for g in decision.differences(x, likeliest)], 1)
    steep = torch.where(steep > 0, steep, steep.amax(1, keepdim=True)).clamp_min(torch.finfo(x.dtype).tiny)
    scale = steep.amax(1, keepdim=True).repeat(1, decision.classes).scatter(1, likeliest, steep)
    return [replace(decision, scale=scale), decision]
