"""All points of one call of `margins`, searched in batches: the independent searches, and the searches that follow them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from excite.margin.budget import ROUNDS, TARGET_STEPS
from excite.margin.problem import (
    AdversarialPerturbations,
    Decision,
    MarginProblem,
    column,
    no_perturbations,
    unit_of_outputs,
)
from excite.margin.reliability.gradient_free import DatasetPoints, towards_points
from excite.margin.search import PLANS, POLISH, TARGETED, CleanPoints, Noise, SearchPlan, search, to_boundary

_CLASSES = 10  # nearest classes whose first-order distance is worked out
_FEW = 1024  # inputs of fewer elements are explored from random perturbations too
_SAMPLES = 8  # random perturbations of which the most promising starts a search
TARGETS = 9  # nearest classes that are searched one by one,
_FAR_CLASS = 3.0  # if they are at most this many times as far away as the nearest one
_BLOCKS = 8  # squares along a side of an image, of which half are set to zero
_TARGETS = 1000  # dataset points towards which points may be moved
# Searches from random perturbations, and around the best one. Where several linear pieces meet, which is where the minima of
# networks with few inputs lie, gradients jump from one to the other: a long average of them points along the edge.
_NEAR = (
    SearchPlan((0.5, 0.005), 0.9, (0.5, 0.01), (0.01, 0.001), 0.5, 0.7, 0.0, proportional=True),
    SearchPlan((1.0, 0.005), 0.4, (0.5, 0.01), (0.01, 0.001), 0.5, 0.7, 0.0),
)
_EDGES = (
    SearchPlan((0.1, 0.002), 0.9, (0.02, 0.002), (0.002, 0.0003), 1.0, 1.0, 0.0, proportional=True),
    SearchPlan((0.3, 0.002), 0.95, (0.05, 0.002), (0.002, 0.0003), 1.0, 1.0, 0.0, proportional=True),
)


@dataclass
class BatchedSearch:
    """The problem of all N points with their clean outputs f, and what the searches found out about them."""

    problem: MarginProblem
    f: Tensor
    batch: int
    steps: int
    seed: int
    runs: list[Tensor] = field(default_factory=list)  # radii (N,) found by each independent search
    start: AdversarialPerturbations | None = None  # perturbations known beforehand: one more search begins there
    targets: int = TARGETS  # nearest classes that are searched one by one
    rounds: int = ROUNDS  # short searches from parts of the best perturbation after those
    retry: bool = True  # points without an adversarial example are searched again
    left_out: str | None = None  # what a budget left out

    def __post_init__(self) -> None:
        x, decision = self.problem.x, self.problem.decision
        self.noise = _noise(self.seed)
        self.problem = replace(
            self.problem, decision=replace(decision, unit=unit_of_outputs(self.f, decision.threshold))
        )
        self.correct = decision.predicted(self.f) == decision.labels
        self.estimate = x.new_zeros(len(x))  # distance to the boundary by the gradient at the clean point
        # not adversarial by gradients, but on the way to another point
        self.missed_by_gradients = torch.zeros_like(self.correct)

    def _batches(self, mask: Tensor) -> tuple[Tensor, ...]:
        """The numbers of the points where `mask` holds, in batches; none where it holds nowhere."""
        points = torch.nonzero(mask)[:, 0]
        return points.split(self.batch) if len(points) else ()

    def run(self, restarts: int, progress: Callable[[int, int], None] | None = None) -> AdversarialPerturbations:
        """The smallest adversarial perturbations of all searches; `progress(done, total)` counts points and restarts."""
        perturbations = no_perturbations(self.problem.x)
        perturbations.radius[~self.correct] = 0
        self.runs = [torch.full_like(perturbations.radius, math.inf) for _ in range(restarts)]
        done = 0
        for index in self._batches(self.correct):
            problem = self.problem.rows(index)
            starts = [_clean(replace(problem, decision=d)) for d in _class_choices(problem, self.f[index])]
            constraint, clean = problem.constraint, starts[0][1]
            slope = constraint.dual_norm(constraint.active(clean.gradient, torch.zeros_like(problem.x)))
            self.estimate[index] = clean.logit_margin / slope
            for k in range(restarts):
                result = self._search(k, index, *starts[k % len(starts)])
                perturbations.update(index, result.radius, result.d)
                self.runs[k][index] = result.radius
                done += len(index)
                if progress is not None:
                    progress(done, restarts * int(self.correct.sum()))
        self._continue(perturbations)
        self._target(perturbations)
        explorations = restarts // 3 if has_few_elements(self.problem.x) else 0
        self._explore(perturbations, explorations)
        if self.retry:
            self._recover(perturbations)
        self._polish(perturbations, edges=explorations > 0)
        return perturbations

    def track(self, d: Tensor) -> AdversarialPerturbations:
        """One search from the clean points, and one of half as many steps from the perturbations d (N, ...) of an earlier model.

        d is zero where there is none. A search from d alone stays in the local minimum of the earlier model: its margins were
        10 % larger than those of a full search for digits and 24 % for CIFAR-10, those of both together 1 % and 4 %.
        """
        perturbations = no_perturbations(self.problem.x)
        perturbations.radius[~self.correct] = 0
        for index in self._batches(self.correct):
            problem = self.problem.rows(index)
            decision = _class_choices(problem, self.f[index])[0]
            result = self._search(0, index, *_clean(replace(problem, decision=decision)))
            perturbations.update(index, result.radius, result.d)
        d = self.problem.constraint.clip(torch.nan_to_num(d))
        radius = self.problem.constraint.length(d)
        self.start = AdversarialPerturbations(torch.where(radius > 0, radius, math.inf), d)
        self._continue(perturbations, self.steps // 2)
        self._recover(perturbations)
        self._polish(perturbations)
        return perturbations

    def _search(self, k: int, index: Tensor, problem: MarginProblem, clean: CleanPoints) -> AdversarialPerturbations:
        """The k-th independent search: the plans in turn, every fourth from the way to a point decided otherwise.

        The others all start along the gradient at the point, which in few dimensions may lead to the wrong side.
        """
        plans = PLANS[problem.constraint.norm]
        plan = plans[k % len(plans)]
        if k % 4 == 3:
            start = self.towards_points(problem, index, nearest=2)
            if bool(torch.isfinite(start.radius).all()):
                result = search(problem, plan, self.steps, start.d, self.noise)
                result.update(torch.arange(len(problem), device=index.device), start.radius, start.d)
                return result
        plan = replace(plan, random_start=1.0) if k >= len(plans) else plan
        return search(problem, plan, self.steps, clean, self.noise)

    def _continue(self, perturbations: AdversarialPerturbations, steps: int | None = None) -> None:
        """Search on from perturbations that were known beforehand."""
        if self.start is None:
            return
        for index in self._batches(self.correct & torch.isfinite(self.start.radius)):
            problem, start = self.problem.rows(index), self.start.rows(index)
            adversarial = problem.decision.evaluate(problem.x + start.d)[1]
            perturbations.update(index[adversarial], start.radius[adversarial], start.d[adversarial])
            result = search(problem, PLANS[problem.constraint.norm][1], steps or self.steps, start.d, self.noise)
            perturbations.update(index, result.radius, result.d)

    def _target(self, perturbations: AdversarialPerturbations) -> None:
        """Many classes: short searches towards each of the nearest classes, within the best radius so far.

        A search that follows the nearest class tends to stay with the first it falls to. Each starts at the best radius, down
        the gradient of the difference to its class at the point. Classes whose boundary is much farther away to first order than
        the nearest one's and the best radius are left out. The last searches start from the best perturbation with random blocks
        of it set to zero, towards the same class: where longer attacks find less, it is of that class as a rule, in another region.
        """
        if self.problem.decision.classes <= 2 or not self.targets:
            return
        for index in self._batches(self.correct & torch.isfinite(perturbations.radius)):
            problem = self.problem.rows(index)
            starts = _nearest_classes(problem, self.f[index], self.targets)
            max_distance = _FAR_CLASS * torch.maximum(starts[0][2], perturbations.radius[index])
            for classes, gradient, distance in starts:
                rows = torch.nonzero(distance <= max_distance)[:, 0]
                if len(rows):
                    below = perturbations.radius[index[rows]]
                    start = problem.constraint.direction(-gradient[rows]) * column(below, gradient)
                    self._search_towards(perturbations, index[rows], classes[rows], start)
            decided = problem.decision.decided(problem.x + perturbations.d[index])
            decided = torch.where(decided == problem.decision.labels, starts[0][0], decided)  # undone by rounding
            for _ in range(self.rounds):
                start, below = _without_blocks(perturbations.d[index], self.noise), perturbations.radius[index]
                size = problem.constraint.length(start).clamp_min(torch.finfo(start.dtype).tiny)
                self._search_towards(perturbations, index, decided, start * column(below / size, start))

    def _search_towards(
        self, perturbations: AdversarialPerturbations, index: Tensor, classes: Tensor, start: Tensor
    ) -> None:
        """A short search of the points `index` towards classes (N,), from `start` of the norm of the best radius."""
        problem, below = self.problem.rows(index), perturbations.radius[index]
        constraint = problem.constraint
        towards = replace(problem, decision=replace(problem.decision, target=classes))
        start = constraint.project(start, below)
        result = search(towards, TARGETED[constraint.norm], TARGET_STEPS, start, self.noise, below)
        perturbations.update(index, result.radius, result.d)

    def _explore(self, perturbations: AdversarialPerturbations, count: int) -> None:
        """Inputs of few elements: searches from random perturbations whose linear piece reaches the boundary soonest.

        At a perturbation d a network is linear nearby. That piece is adversarial from the radius (logit margin − gradient·d) /
        ‖gradient‖_dual on, if it extends so far: of some random perturbations within the best radius the one where this is
        smallest starts a search.
        """
        noise = _noise(self.seed + 1)  # its own, so that what follows draws what it drew without
        for index in self._batches(self.correct) if count else ():
            problem = self.problem.rows(index)
            for k in range(count):
                max_radius = torch.minimum(perturbations.radius[index], problem.constraint.init_radius)
                start = _promising(problem, max_radius, noise)
                result = search(problem, _NEAR[k % 2], self.steps // 2, start, noise)
                perturbations.update(index, result.radius, result.d)

    def _recover(self, perturbations: AdversarialPerturbations) -> None:
        """Points without an adversarial perturbation: start again from the way to points decided otherwise."""
        for index in self._batches(torch.isinf(perturbations.radius)):
            problem = self.problem.rows(index)
            start = self.towards_points(problem, index)
            perturbations.update(index, start.radius, start.d)
            adversarial = torch.isfinite(start.radius)
            self.missed_by_gradients[index] = adversarial
            index, rows = index[adversarial], torch.nonzero(adversarial)[:, 0]
            if len(index):
                plan = PLANS[problem.constraint.norm][0]
                result = search(problem.rows(rows), plan, self.steps, start.d[rows], self.noise)
                perturbations.update(index, result.radius, result.d)

    def _polish(self, perturbations: AdversarialPerturbations, edges: bool = False) -> None:
        """Small steps around the best perturbation of all searches, then along it to the boundary."""
        for index in self._batches(self.correct & torch.isfinite(perturbations.radius)):
            problem = self.problem.rows(index)
            plan, steps = POLISH[problem.constraint.norm], max(2, 2 * self.steps // 5)
            result = search(problem, plan, steps, perturbations.d[index], self.noise)
            perturbations.update(index, result.radius, result.d)
            for edge in _EDGES if edges else ():
                result = search(problem, edge, 2 * self.steps, perturbations.d[index], self.noise)
                perturbations.update(index, result.radius, result.d)
            result = to_boundary(problem, perturbations.rows(index), rounds=8)
            perturbations.update(index, result.radius, result.d)

    def towards_points(self, problem: MarginProblem, index: Tensor, nearest: int = 5) -> AdversarialPerturbations:
        """Perturbations of the points `index` that lead to dataset points decided otherwise, as far as the boundary."""
        x, predicted = self.problem.x[:: self.stride], self.problem.decision.predicted(self.f[:: self.stride])
        return towards_points(problem, DatasetPoints(x, predicted), self.noise, nearest)

    def shaped(self, d: Tensor) -> Tensor | dict[str, Tensor]:
        """The perturbations as users get them."""
        return d

    @property
    def stride(self) -> int:
        """One in so many dataset points is a target of `towards_points`: at most `_TARGETS`, evenly taken."""
        return max(1, math.ceil(len(self.problem) / _TARGETS))

    def verify(self, perturbations: AdversarialPerturbations) -> None:
        """Make perturbations adversarial by more than rounding, which differs with the size of the batch and the memory format."""
        x, decision = self.problem.x, replace(self.problem.decision, channels_last=False)
        as_given = replace(self.problem, decision=decision)
        # A model may work in single precision also for inputs in double precision.
        types = {x.dtype, self.f.dtype, *(p.dtype for p in decision.model.parameters())}
        epsilon = torch.finfo(torch.float32 if torch.float32 in types else x.dtype).eps
        for index in self._batches(self.correct & torch.isfinite(perturbations.radius)):
            f = self.f[index]
            size = f.abs() if f.dim() == 1 else f.abs().amax(1)
            rounding = 64 * epsilon * (size + abs(decision.threshold) * (f.dim() == 1)) * decision.unit
            for more in (
                0,
                8,
                32,
                128,
                512,
                2048,
                8192,
                32768,
                131072,
            ):  # the last ones for points almost on the boundary
                problem = as_given.rows(index)
                d = problem.constraint.clip(perturbations.d[index] * (1 + more * epsilon))
                logit_margin, adversarial = problem.decision.evaluate(problem.x + d)
                clear = adversarial & (logit_margin <= -rounding)
                done = index[clear]
                perturbations.d[done] = d[clear]
                perturbations.radius[done] = problem.constraint.length(d)[clear]
                index, rounding = index[~clear], rounding[~clear]
                if not len(index):
                    break


def _promising(problem: MarginProblem, max_radius: Tensor, noise: Noise) -> Tensor:
    """Of random perturbations within `max_radius` (N,), the one whose linear piece is adversarial at the smallest radius."""
    constraint, x = problem.constraint, problem.x
    best, chosen = torch.full_like(max_radius, math.inf), torch.zeros_like(x)
    for k in range(_SAMPLES):
        size = max_radius * (0.3 + 0.7 * (k + 1) / _SAMPLES)
        d = noise(x.shape, x)
        d = constraint.direction(d) if k % 2 else constraint.scaled(d)
        d = constraint.project(d * column(size, d), size)
        logit_margin, adversarial, gradient = problem.decision.gradients(x + d)
        slope = constraint.dual_norm(gradient).clamp_min(torch.finfo(x.dtype).tiny)
        radius = ((logit_margin - (gradient * d).flatten(1).sum(1)) / slope).clamp_min(0)
        radius = torch.where(adversarial, 0, radius)
        better = radius < best
        best, chosen = torch.where(better, radius, best), torch.where(column(better, d), d, chosen)
    return chosen


def _without_blocks(d: Tensor, noise: Noise) -> Tensor:
    """d with half of it set to zero: of images squares of an eighth of the side, of anything else single elements."""
    if d.dim() != 4:
        return d * (noise(d.shape, d) > 0)
    sides = [min(_BLOCKS, side) for side in d.shape[2:]]
    blocks = (noise(torch.Size((len(d), 1, *sides)), d) > 0).to(d.dtype)
    return d * F.interpolate(blocks, size=d.shape[2:])


def default_batch(x: Tensor) -> int:
    """Small enough for the caches of a CPU, large enough to keep a GPU busy."""
    max_numbers = 2**19 if x.device.type == "cpu" else 2**24
    return min(max(max_numbers // x[0].numel(), 32), 4096)


def default_restarts(x: Tensor) -> int:
    """More for inputs of few elements, where local minima matter more."""
    return 12 if has_few_elements(x) else 3


def has_few_elements(x: Tensor) -> bool:
    """Whether points have so few elements that they are explored from random perturbations too."""
    return x[0].numel() < _FEW


def _noise(seed: int) -> Noise:
    """Standard normal draws from a generator of our own, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return lambda shape, like: torch.randn(shape, generator=generator, dtype=like.dtype).to(like.device)


def _clean(problem: MarginProblem) -> tuple[MarginProblem, CleanPoints]:
    return problem, CleanPoints(*problem.decision.gradients(problem.x), problem.constraint.init_radius)


def _class_choices(problem: MarginProblem, f: Tensor) -> list[Decision]:
    """Which of many classes to steer towards: the nearest to first order in one search, the likeliest in the next.

    Once a point is adversarial it tends to stay with the class it fell to, so that the first choice matters.
    """
    decision = problem.decision
    if decision.classes <= 2:
        return [decision]
    likeliest, slope, _ = _differences(problem, f)
    scale = slope.amax(1, keepdim=True).repeat(1, decision.classes).scatter(1, likeliest, slope)
    return [replace(decision, scale=scale), decision]


def _differences(problem: MarginProblem, f: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest other classes (N, k), and of the difference of the label's output and theirs the slope (N, k) and gradient."""
    decision, constraint, x = problem.decision, problem.constraint, problem.x
    other_outputs = f.scatter(1, decision.labels[:, None], -math.inf)
    likeliest = other_outputs.topk(min(_CLASSES, decision.classes - 1), dim=1).indices
    zero = torch.zeros_like(x)
    gradients = [constraint.active(g, zero) for g in decision.differences(x, likeliest)]
    slope = torch.stack([constraint.dual_norm(g) for g in gradients], 1)
    slope = torch.where(slope > 0, slope, slope.amax(1, keepdim=True)).clamp_min(torch.finfo(x.dtype).tiny)
    return likeliest, slope, torch.stack(gradients, 1)


def _nearest_classes(problem: MarginProblem, f: Tensor, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The `count` classes (N,) nearest to first order, the gradients towards them, and their distances (N,)."""
    likeliest, slope, gradients = _differences(problem, f)
    own = f.gather(1, problem.decision.labels[:, None])
    distance = problem.decision.unit * (own - f.gather(1, likeliest)) / slope
    chosen = distance.topk(min(count, likeliest.shape[1]), dim=1, largest=False).indices
    rows = torch.arange(len(f), device=f.device)
    return [(likeliest[rows, k], gradients[rows, k], distance[rows, k]) for k in chosen.unbind(1)]
