"""The margin when the inputs of layers may be perturbed too: the decision, the constraint and the searches for it.

The search variable of a point is the row of all its perturbations (see `sites`), starting from zero, so that the
searches for input margins serve as they are. The norm "inf" of a row is the largest over the layers; its norm "2" is
the root of the sum of the squared norms of the layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from excite._core.calls import pick_output
from excite._core.checks import Norm
from excite.margin.batches import BatchedSearch, default_batch
from excite.margin.problem import AdversarialPerturbations, Constraint, Decision, MarginProblem, make_constraint
from excite.margin.reliability.gradient_free import DatasetPoints, towards_points
from excite.margin.sites import InputSite, InputSites


@dataclass(frozen=True, kw_only=True)
class LayerDecision(Decision):
    """Decisions at points (N, ...) that stay, as a function of the perturbations (N, width).

    units (N, sites): the perturbation of site k is its part of the row times units[:, k].
    """

    sites: InputSites
    points: Tensor
    units: Tensor

    def rows(self, index: Tensor) -> LayerDecision:
        """Returns the problem of some of the points."""
        fewer = super().rows(index)
        assert isinstance(fewer, LayerDecision)
        return replace(fewer, points=self.points[index], units=self.units[index])

    def outputs(self, z: Tensor) -> Tensor:
        """Returns the outputs (K,) or (K, m) at perturbations z (K, width)."""
        f = pick_output(self.sites.run(self.points, self.parts(z)), self.output)
        return f.reshape(len(z)) if self.classes == 1 else f

    def parts(self, z: Tensor) -> list[Tensor]:
        """The perturbations by site, (N, columns) each."""
        return [z[:, site.columns] * self.units[:, k, None] for k, site in enumerate(self.sites.places)]


def measure_signals(sites: InputSites, x: Tensor, norm: Norm, relative: bool, size: int) -> tuple[Tensor, Tensor]:
    """The unit of every point at every site (N, sites), and the norm of the longest row of clean signals.

    Units are 1, or if `relative` the root mean square of the signal ("inf") or its norm ("2").
    """
    order = math.inf if norm == "inf" else 2.0
    units, largest = [], torch.zeros((), dtype=sites.dtype, device=x.device)
    for batch in x.split(size):
        signals = sites.signals(batch)
        lengths = torch.stack([torch.linalg.vector_norm(s, 2.0, dim=1) for s in signals], 1)
        if norm == "inf":
            lengths = lengths / torch.tensor([s.shape[1] for s in signals], dtype=sites.dtype, device=x.device).sqrt()
        unit = lengths if relative else torch.ones_like(lengths)
        units.append(unit)
        sizes = torch.stack([torch.linalg.vector_norm(s, order, dim=1) for s in signals], 1)
        sizes = torch.where(unit > 0, sizes / unit, 0.0)
        largest = torch.maximum(largest, torch.linalg.vector_norm(sizes, order, dim=1).max())
    return torch.cat(units), largest


def make_layer_constraint(
    sites: InputSites, x: Tensor, norm: Norm, bounds: tuple[Tensor, Tensor] | None, units: Tensor, largest: Tensor
) -> Constraint:
    """The constraint of the rows. Bounds hold for each perturbation of a signal that is x itself; the others have none."""
    max_radius = (1e6 * largest.clamp_min(1e-3)).expand(len(x)).contiguous()
    if bounds is None or not any(site.is_x for site in sites.places):
        return Constraint(norm, None, None, max_radius)
    box = make_constraint(x, norm, bounds)
    assert box.low is not None
    assert box.high is not None
    low = torch.full((len(x), sites.width), -math.inf, dtype=sites.dtype, device=x.device)
    high = torch.full_like(low, math.inf)
    for k, site in enumerate(sites.places):
        if site.is_x:
            unit = units[:, k, None]
            for side, bound in ((low, box.low), (high, box.high)):
                (moved,) = sites.signals(bound.contiguous(), [site])
                side[:, site.columns] = torch.where(unit > 0, moved / unit, 0.0)
    return Constraint(norm, low, high, max_radius, partial=True)


@dataclass
class LayerSearch(BatchedSearch):
    """The searches over rows of perturbations; the points of the problem are the rows of zeros at which they start.

    ways: sites by which another dataset point can be reached, with the signals there (N, columns).
    """

    ways: list[tuple[int, Tensor]] = field(default_factory=list)

    def shaped(self, d: Tensor) -> dict[str, Tensor]:
        """By name of the layer, each in the shape that its input has for all points at once."""
        decision = self.problem.decision
        assert isinstance(decision, LayerDecision)
        pairs = zip(decision.sites.places, decision.parts(d))
        return {site.name: site.join(vector, site.shape(len(d))) for site, vector in pairs}

    def towards_points(self, problem: MarginProblem, index: Tensor, nearest: int = 5) -> AdversarialPerturbations:
        """As for inputs, through one site at a time: x, and the last one."""
        decision, x, stride = problem.decision, problem.x, self.stride
        assert isinstance(decision, LayerDecision)
        predicted = self.problem.decision.predicted(self.f)[::stride]
        best: AdversarialPerturbations | None = None
        for k, signals in self.ways:
            columns, unit = decision.sites.places[k].columns, decision.units[:, k, None]

            def lift(change: Tensor, columns: slice = columns, unit: Tensor = unit) -> Tensor:
                return lifted(torch.where(unit > 0, change / unit, 0.0), columns, x)

            targets = DatasetPoints(signals[::stride], predicted)
            perturbations = towards_points(problem, targets, self.noise, nearest, at=signals[index], lift=lift)
            if best is None:
                best = perturbations
            best.update(torch.arange(len(x), device=x.device), perturbations.radius, perturbations.d)
        assert best is not None
        return best


def layer_search(
    sites: InputSites,
    at_input: BatchedSearch,
    bounds: tuple[Tensor, Tensor] | None,
    relative: bool,
    batch: int | None,
    first: AdversarialPerturbations | None,
) -> LayerSearch:
    """The search at `sites` for the points of a search over inputs; `first`, what that found, is one of the starts."""
    x, norm, decision = at_input.problem.x, at_input.problem.constraint.norm, at_input.problem.decision
    rows = torch.zeros(1, 1, dtype=sites.dtype, device=x.device).expand(len(x), sites.width)
    size = default_batch(rows) if batch is None else batch
    units, largest = measure_signals(sites, x, norm, relative, size)
    constraint = make_layer_constraint(sites, x, norm, bounds, units, largest)
    inside = LayerDecision(
        decision.model,
        decision.output,
        decision.threshold,
        decision.labels,
        decision.classes,
        sites=sites,
        points=x,
        units=units,
    )
    start = None if first is None else from_input(inside, constraint, first, size)
    problem = MarginProblem(inside, rows, constraint)
    ways = find_ways(sites, x, size)
    return LayerSearch(problem, at_input.f, size, at_input.steps, at_input.seed, start=start, ways=ways)


def lifted(change: Tensor, columns: slice, like: Tensor) -> Tensor:
    """Rows that are zero but for some columns."""
    rows = torch.zeros_like(like, memory_format=torch.contiguous_format)
    rows[:, columns] = change
    return rows


def find_ways(sites: InputSites, x: Tensor, size: int) -> list[tuple[int, Tensor]]:
    """The sites by which another dataset point can be reached: x where one site alone reads it, and the last site."""
    ends = {sites.places.index(sites.entry)} if sites.entry is not None else set()
    ends.add(len(sites.places) - 1)
    sites_of_ways: list[InputSite] = [sites.places[k] for k in sorted(ends)]
    signals = [sites.signals(batch, sites_of_ways) for batch in x.split(size)]
    return [(k, torch.cat([batch[i] for batch in signals])) for i, k in enumerate(sorted(ends))]


def from_input(
    decision: LayerDecision, constraint: Constraint, perturbations: AdversarialPerturbations, size: int
) -> AdversarialPerturbations | None:
    """The result of a search over inputs, as rows; None where x cannot be changed through one site."""
    sites, entry = decision.sites, decision.sites.entry
    if entry is None:
        return None
    unit = decision.units[:, sites.places.index(entry), None]
    moved = torch.cat([sites.signals(batch, [entry])[0] for batch in perturbations.d.split(size)])
    like = torch.zeros(1, 1, dtype=sites.dtype, device=moved.device).expand(len(moved), sites.width)
    rows = lifted(torch.where(unit > 0, moved / unit, 0.0), entry.columns, like)
    radius = constraint.length(rows)
    return AdversarialPerturbations(torch.where(torch.isfinite(perturbations.radius), radius, math.inf), rows)
