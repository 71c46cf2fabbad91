"""`margins`: the distance of points to the decision boundary of a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from excite.errors import InputError
from excite.margin.blind import blind_search, from_others
from excite.margin.certify import certified_radii, check_against, known_constant
from excite.margin.decision import Decision
from excite.margin.evidence import AGREE, BEATEN, MISLED, Evidence
from excite.margin.inputs import (
    Bounds,
    checked_bounds,
    checked_count,
    checked_labels,
    checked_outputs,
    checked_points,
    checked_threshold,
)
from excite.margin.result import Margins
from excite.margin.room import Room, column, length, make_room
from excite.margin.search import BOLD, STEADY, Found, Noise, Opening, nothing, search, to_boundary
from excite.norms import Norm, parse_norm
from excite.wiring.calling import Pick, pick_output
from excite.wiring.untouched import evaluating

_CLASSES = 10  # nearest classes whose first-order distance is worked out
_CHECKED = 64  # points given to the gradient-free search
_QUERIES = 300  # forward passes it may use for each
_POOL = 1000  # data points towards which it may start


def margins(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    norm: object = "inf",
    bounds: Bounds | None = None,
    threshold: float = 0.5,
    output: Pick = None,
    steps: int = 100,
    restarts: int = 2,
    evidence: bool = True,
    certify: bool = True,
    lipschitz: float | None = None,
    perturbations: bool = False,
    batch: int | None = None,
    seed: int = 0,
) -> Margins:
    """For each point the size of the smallest perturbation found that changes the model's decision.

    x (N, ...) in float32 or float64, y (N,). Outputs (N,) or (N, 1) decide by f > threshold, labels 0 and 1; outputs
    (N, m) by argmax, labels 0 to m − 1. norm is "inf" or "2", over all elements of one input. With bounds=(lowest,
    highest), numbers or tensors that broadcast to x, inputs stay between them. A misclassified point has margin 0; one
    that nothing broke has +inf.

    `restarts` independent searches look at every point, the first with `steps` gradient steps, the others with half as
    many; the smallest perturbation counts. `evidence=False` leaves out the checks of whether that worked. `certify`
    adds lower bounds where a Lipschitz constant is known, or from `lipschitz` if given (same norm for inputs and
    outputs). `batch` points are searched at a time. The model, its mode, its gradients and the random state stay as
    they are.
    """
    kind = parse_norm(norm, ("inf", "2"))
    steps, restarts = checked_count("steps", steps, 2), checked_count("restarts", restarts, 1)
    threshold = checked_threshold(threshold)
    if lipschitz is not None and not (isinstance(lipschitz, int | float) and 0 <= lipschitz < math.inf):
        raise InputError(f"expected lipschitz as a finite number of at least 0; got {lipschitz!r}")
    with evaluating(model), torch.inference_mode(False), torch.enable_grad():
        x = checked_points(x)
        room = make_room(x, kind, checked_bounds(bounds, x))
        size = _batch_size(x) if batch is None else checked_count("batch", batch, 1)
        f = _outputs(model, x, output, size)
        classes = checked_outputs(f, x)
        f = f.reshape(len(x)) if classes == 1 else f
        decision = Decision(model, output, threshold, checked_labels(y, x, classes), classes)
        task = _Task(decision, x, room, f, size, steps, _noise(seed))
        found = task.run(restarts)
        gathered = task.gather(found) if evidence else None
        task.firm(found)
    values = found.radius.double().cpu()
    result = Margins(values, kind, perturbations=found.d if perturbations else None)
    if gathered is not None:
        result = replace(result, evidence=gathered[0], suspect=gathered[1].cpu())
    return _certified(result, decision, f, x, lipschitz) if certify or lipschitz is not None else result


def _outputs(model: nn.Module, x: Tensor, output: Pick, size: int) -> Tensor:
    with torch.no_grad():
        return torch.cat([pick_output(model(part), output) for part in x.split(size)])


def _batch_size(x: Tensor) -> int:
    """Small enough for the caches of a CPU, large enough to keep a GPU busy."""
    most = 2**19 if x.device.type == "cpu" else 2**24
    return min(max(most // x[0].numel(), 32), 4096)


def _noise(seed: int) -> Noise:
    """Standard normal draws from a generator of our own, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return lambda shape, like: torch.randn(shape, generator=generator, dtype=like.dtype).to(like.device)


@dataclass
class _Task:
    """All points of one call of `margins`, searched in batches of `size`."""

    decision: Decision
    x: Tensor
    room: Room
    f: Tensor  # clean outputs
    size: int
    steps: int
    noise: Noise

    def __post_init__(self) -> None:
        self.right = self.decision.chosen(self.f) == self.decision.labels
        shape = (len(self.x),)
        self.estimate = torch.full(shape, math.inf, dtype=self.x.dtype, device=self.x.device)
        self.runs: list[Tensor] = []  # radii found by each independent search
        self.lost = torch.zeros(shape, dtype=torch.bool, device=self.x.device)

    def run(self, restarts: int) -> Found:
        found = nothing(self.x)
        found.radius[~self.right] = 0
        self.runs = [torch.full_like(found.radius, math.inf) for _ in range(restarts)]
        cap = self.room.reach if self.room.low is not None else self.room.reach / 1e6
        for index in torch.nonzero(self.right)[:, 0].split(self.size):
            x, room, decision = self.x[index], self.room.rows(index), self.decision.rows(index)
            decision = _weighed(decision, x, room, self.f[index])
            opening = Opening(*decision.slope(x), cap[index])
            self.estimate[index] = opening.slack / room.slope(opening.gradient)
            for k in range(restarts):
                plan = (BOLD, STEADY)[k % 2][room.norm]
                if k > 1:
                    plan = replace(plan, scatter=1.0)
                radii = search(decision, x, room, plan, self.steps if k == 0 else self.steps // 2, opening, self.noise)
                found.take(index, radii.radius, radii.d)
                self.runs[k][index] = radii.radius
        self._recover(found)
        for index in torch.nonzero(self.right)[:, 0].split(self.size):
            part = to_boundary(self.decision.rows(index), self.x[index], self.room.rows(index), _part(found, index), 8)
            found.take(index, part.radius, part.d)
        return found

    def _recover(self, found: Found) -> None:
        """Points that the search did not break: start again from the way to points decided otherwise."""
        for index in torch.nonzero(torch.isinf(found.radius))[:, 0].split(self.size):
            x, room, decision = self.x[index], self.room.rows(index), self.decision.rows(index)
            start = from_others(decision, x, room, *self._pool())
            found.take(index, start.radius, start.d)
            broken = torch.isfinite(start.radius)
            self.lost[index] = broken
            index, rows = index[broken], torch.nonzero(broken)[:, 0]
            if len(index):
                again = search(
                    decision.rows(rows), x[rows], room.rows(rows), BOLD[room.norm], self.steps // 2, start.d[rows], self.noise
                )
                found.take(index, again.radius, again.d)

    def _pool(self) -> tuple[Tensor, Tensor]:
        """At most `_POOL` data points, evenly taken, and the classes decided for there."""
        every = max(1, math.ceil(len(self.x) / _POOL))
        return self.x[::every], self.decision.chosen(self.f[::every])
