"""The margin when the inputs of layers may be perturbed too: the decision, the room and the searches for it.

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
from excite.margin.batches import Task, batch_size
from excite.margin.constraints import Room, make_room
from excite.margin.problem import Decision
from excite.margin.gradient_free import from_others
from excite.margin.search import Found
from excite.margin.sites import Site, Sites


@dataclass(frozen=True, kw_only=True)
class LayerDecision(Decision):
    """Decisions at points (N, ...) that stay, as a function of the perturbations (N, width).

    units (N, sites): the perturbation of site k is its part of the row times units[:, k].
    """

    sites: Sites
    points: Tensor
    units: Tensor

    def rows(self, index: Tensor) -> LayerDecision:
        fewer = replace(self, points=self.points[index], units=self.units[index])
        return replace(fewer, labels=self.labels[index], scale=None if self.scale is None else self.scale[index])

    def outputs(self, z: Tensor) -> Tensor:
        f = pick_output(self.sites.run(self.points, self.parts(z)), self.output)
        return f.reshape(len(z)) if self.classes == 1 else f

    def parts(self, z: Tensor) -> list[Tensor]:
        """The perturbations by site, (N, columns) each."""
        return [z[:, site.columns] * self.units[:, k, None] for k, site in enumerate(self.sites.places)]


def measure_signals(sites: Sites, x: Tensor, norm: Norm, relative: bool, size: int) -> tuple[Tensor, Tensor]:
    """The unit of every point at every site (N, sites), and the norm of the longest row of clean signals.

    Units are 1, or if `relative` the root mean square of the signal ("inf") or its norm ("2").
    """
    order = math.inf if norm == "inf" else 2.0
    units, largest = [], torch.zeros((), dtype=sites.dtype, device=x.device)
    for part in x.split(size):
        signals = sites.signals(part)
        lengths = torch.stack([torch.linalg.vector_norm(s, 2.0, dim=1) for s in signals], 1)
        if norm == "inf":
            lengths = lengths / torch.tensor([s.shape[1] for s in signals], dtype=sites.dtype, device=x.device).sqrt()
        unit = lengths if relative else torch.ones_like(lengths)
        units.append(unit)
        sizes = torch.stack([torch.linalg.vector_norm(s, order, dim=1) for s in signals], 1)
        sizes = torch.where(unit > 0, sizes / unit, 0.0)
        largest = torch.maximum(largest, torch.linalg.vector_norm(sizes, order, dim=1).max())
    return torch.cat(units), largest


def make_layer_room(
    sites: Sites, x: Tensor, norm: Norm, bounds: tuple[Tensor, Tensor] | None, units: Tensor, largest: Tensor
) -> Room:
    """The room of the rows. Bounds hold for each perturbation of a signal that is x itself; the others have none."""
    reach = (1e6 * largest.clamp_min(1e-3)).expand(len(x)).contiguous()
    if bounds is None or not any(site.is_x for site in sites.places):
        return Room(norm, None, None, reach)
    box = make_room(x, norm, bounds)
    assert box.low is not None
    assert box.high is not None
    low = torch.full((len(x), sites.width), -math.inf, dtype=sites.dtype, device=x.device)
    high = torch.full_like(low, math.inf)
    for k, site in enumerate(sites.places):
        if site.is_x:
            unit = units[:, k, None]
            for side, given in ((low, box.low), (high, box.high)):
                (moved,) = sites.signals(given.contiguous(), [site])
                side[:, site.columns] = torch.where(unit > 0, moved / unit, 0.0)
    return Room(norm, low, high, reach, partly=True)


@dataclass
class LayerTask(Task):
    """The searches over rows of perturbations; `x` are the rows of zeros at which they start.

    ways: sites by which another data point can be reached, with the signals there (N, columns).
    """

    ways: list[tuple[int, Tensor]] = field(default_factory=list)

    def shaped(self, d: Tensor) -> dict[str, Tensor]:
        """By name of the layer, each in the shape that its input has for all points at once."""
        assert isinstance(self.decision, LayerDecision)
        pairs = zip(self.decision.sites.places, self.decision.parts(d))
        return {site.name: site.join(part, site.shape(len(d))) for site, part in pairs}

    def others(self, decision: Decision, index: Tensor, nearest: int = 5) -> Found:
        """As for inputs, through one site at a time: x, and the last one."""
        assert isinstance(decision, LayerDecision)
        x, room = self.x[index], self.room.rows(index)
        every, chosen = self.every, self.decision.chosen(self.f)
        best: Found | None = None
        for k, signals in self.ways:
            columns, unit = decision.sites.places[k].columns, decision.units[:, k, None]

            def lift(change: Tensor, columns: slice = columns, unit: Tensor = unit) -> Tensor:
                return lifted(torch.where(unit > 0, change / unit, 0.0), columns, x)

            found = from_others(
                decision, x, room, signals[::every], chosen[::every], self.noise, nearest, at=signals[index], lift=lift
            )
            if best is None:
                best = found
            best.take(torch.arange(len(x), device=x.device), found.radius, found.d)
        assert best is not None
        return best


def layer_task(
    sites: Sites,
    decision: Decision,
    x: Tensor,
    f: Tensor,
    norm: Norm,
    bounds: tuple[Tensor, Tensor] | None,
    relative: bool,
    steps: int,
    seed: int,
    batch: int | None,
    first: Found | None,
) -> LayerTask:
    """The task for points x with outputs f; `first` is what a search over inputs found, one of the starts."""
    rows = torch.zeros(1, 1, dtype=sites.dtype, device=x.device).expand(len(x), sites.width)
    size = batch_size(rows) if batch is None else batch
    units, largest = measure_signals(sites, x, norm, relative, size)
    room = make_layer_room(sites, x, norm, bounds, units, largest)
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
    start = None if first is None else from_input(inside, room, first, size)
    return LayerTask(inside, rows, room, f, size, steps, seed, start=start, ways=find_ways(sites, x, size))


def lifted(part: Tensor, columns: slice, like: Tensor) -> Tensor:
    """Rows that are zero but for some columns."""
    rows = torch.zeros_like(like, memory_format=torch.contiguous_format)
    rows[:, columns] = part
    return rows


def find_ways(sites: Sites, x: Tensor, size: int) -> list[tuple[int, Tensor]]:
    ends = {sites.places.index(sites.entry)} if sites.entry is not None else set()
    ends.add(len(sites.places) - 1)
    wanted: list[Site] = [sites.places[k] for k in sorted(ends)]
    heard = [sites.signals(part, wanted) for part in x.split(size)]
    return [(k, torch.cat([h[i] for h in heard])) for i, k in enumerate(sorted(ends))]


def from_input(decision: LayerDecision, room: Room, found: Found, size: int) -> Found | None:
    """What a search over inputs found, as rows; None where x cannot be changed through one site."""
    sites, entry = decision.sites, decision.sites.entry
    if entry is None:
        return None
    unit = decision.units[:, sites.places.index(entry), None]
    moved = torch.cat([sites.signals(part, [entry])[0] for part in found.d.split(size)])
    like = torch.zeros(1, 1, dtype=sites.dtype, device=moved.device).expand(len(moved), sites.width)
    rows = lifted(torch.where(unit > 0, moved / unit, 0.0), entry.columns, like)
    radius = room.length(rows)
    return Found(torch.where(torch.isfinite(found.radius), radius, math.inf), rows)
