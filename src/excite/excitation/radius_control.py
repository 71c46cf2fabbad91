"""Controllers of automatic radii: as much excitation as accuracy allows, and no more than is needed.

The radius of a layer is a factor r times the root mean square of its input. The controller knows what the radius costs and,
if there is a gap to close, whether it is needed:

    headroom = (allowed − cost)/allowed,    need = 1, or (gap − target)/target with a target for the gap
    r ← r·exp(rate · clamp(min(need, headroom), −BACK, 1) + lead · Δneed),    from START to a largest value

so that r settles where the cost is what is allowed, or the gap at its target, whichever comes first. The lead is 0 but for the
gap. With the first term alone r is too late for a gap that opens at once, as where the learning rate drops; a higher rate makes it
oscillate, since the network answers late. With the second one r changes as soon as the gap does (a PI controller of log r).

- `radius="auto"` of `PersistentExcitation` moves r at every training step. The cost is the training error: the fraction of the
  samples that are decided wrongly in the middle of their two extremes, smoothed over about 500 samples, whatever the size of
  the batches. Allowed is half of MAX_COST, one point, since the error goes up and down around what is allowed; or with rare
  classes a quarter of the chance that two samples have different labels, if that is less: the best constant decision errs
  at least twice as often, so that a constant network always costs more than is allowed. A network that does not fit its
  training data to within a point is not excited any further.
- `hidden_radius="auto"` of `AdversarialTraining` moves r every few steps. Both robust accuracies, on the batch at hand and on
  as many held-out points, are measured by the attack of the training on the input alone, with the model in evaluation mode,
  and smoothed. The gap is their difference. The accuracy on held-out data falls from its best for two reasons: by
  overfitting, while that on training data rises, and by too large a radius, while that on training data falls as well.
  Overfitting takes no more from held-out data than training data gain, so that the cost is what held-out data have lost since
  their best beyond what training data gained since then. Allowed are two points, one of the held-out points and two standard
  errors of that measurement. With few data the target may be out of reach: the cost then decides.

Everything is computed with tensors where the model is: nothing waits for a GPU, and a captured step reads the current r.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from excite._core.calls import check_finite
from excite._core.checks import check_count, check_dense, check_number
from excite.errors import InputError

START = 1e-3
MAX_COST = 0.02
BACK = 3.0
SAMPLES = 500  # over which the training error is smoothed
RATE, FULL = 0.01, 20  # of the growth per step; less for smaller batches, whose errors are smoothed over more steps
GAP_RATE, GAP_MEMORY = 0.07, 0.8  # per measurement of the gap
GAP_LEAD = 0.5  # per change of need


class RadiusController:
    """The factor of a radius, and the law by which it moves; each number is a tensor in float32.

    Attributes:
        factor: r.
        cost: what r costs, in points of accuracy as a fraction; NaN before the first measurement.
        allowed: what it may cost.
        largest: upper limit of r.
    """

    largest = 1.0
    numbers: ClassVar[tuple[str, ...]] = ("factor", "cost", "allowed")

    def __init__(self) -> None:
        self.factor = torch.tensor(START)
        self.cost = torch.tensor(1.0)
        self.allowed = torch.tensor(MAX_COST)

    def to(self, device: torch.device) -> None:
        """Moves the state to a device."""
        if self.factor.device != device:
            for name, value in vars(self).items():
                if isinstance(value, Tensor):
                    setattr(self, name, value.to(device))

    def move(self, need: Tensor | float, rate: float, lead: Tensor | float = 0.0) -> None:
        """One step of the law; `lead` is the whole second term."""
        tiny = torch.finfo(torch.float32).tiny
        allowance = (self.allowed - self.cost) / self.allowed.clamp(min=tiny)
        # A number is not made a tensor: its copy to a GPU would wait for it.
        pull = torch.minimum(need.to(allowance), allowance) if isinstance(need, Tensor) else allowance.clamp(max=need)
        growth = rate * pull.clamp(-BACK, 1).nan_to_num(0.0) + lead
        self.factor.copy_((self.factor * torch.exp(growth)).clamp(START, self.largest))

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {name: float(getattr(self, name)) for name in self.numbers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; numbers that an earlier version did not store stay as they are."""
        for name in self.numbers:
            if name in state:
                getattr(self, name).fill_(state[name])

    def __repr__(self) -> str:
        return f"'auto' (factor {float(self.factor):.3g}, cost {float(self.cost):.3g} of {float(self.allowed):.3g})"


class FitController(RadiusController):
    """Holds the error on training batches at what is allowed."""

    numbers: ClassVar[tuple[str, ...]] = ("factor", "cost", "allowed", "variety", "last")

    def __init__(self) -> None:
        super().__init__()
        self.variety = torch.tensor(0.5)  # the chance that two samples have different labels
        self.last = torch.tensor(-1.0)  # the last label

    @torch.no_grad()
    def observe(self, right: Tensor, labels: Tensor) -> None:
        """Takes the decisions of one training step and moves the radius.

        Args:
            right: Whether each sample is decided rightly, (B,) of bool.
            labels: Classes (B,).
        """
        samples = right.numel()
        memory = math.exp(-samples / SAMPLES)
        self.cost.mul_(memory).add_((1 - memory) * (~right).float().mean())
        labels = labels.float()
        before = torch.cat([self.last[None], labels[:-1]])
        differ = (before != labels).float()
        differ[0] = torch.where(self.last < 0, self.variety, differ[0])  # nothing was before the first
        self.variety.mul_(memory).add_((1 - memory) * differ.mean())
        self.last.copy_(labels[-1])
        self.allowed.copy_((self.variety / 4).clamp(max=MAX_COST / 2))
        self.move(1.0, RATE * min(samples / FULL, 1.0))

    def measured(self) -> dict[str, float]:
        """Metrics for a run: the factor, the smoothed training error and what is allowed of it."""
        return {name: float(getattr(self, name)) for name in ("factor", "cost", "allowed")}


class GapController(RadiusController):
    """Holds the gap between robust accuracy on training and on held-out data at a target, as far as its cost allows.

    Args:
        held_out: Points and labels (x, y) that are not trained on.
        target: Gap to hold, as a difference of fractions.
        every: Steps between two measurements.

    Raises:
        InputError: If there are no held-out points, or not one label for each.
    """

    largest = 0.05
    numbers: ClassVar[tuple[str, ...]] = ("factor", "cost", "allowed", "train", "held", "best", "train_at_best", "need")

    def __init__(self, held_out: object, target: float, every: int):
        super().__init__()
        if held_out is None:
            raise InputError(
                "hidden_radius='auto' holds the gap between training and held-out data: give held_out=(x, y), "
                "points that are not trained on"
            )
        if not isinstance(held_out, tuple | list) or len(held_out) != 2:
            raise InputError(f"held_out: expected points and labels (x, y); got {type(held_out).__name__}")
        x, y = held_out
        if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.dim() and len(x) == y.numel() > 0):
            raise InputError("held_out: expected points (N, ...) and one label each, N at least 1")
        check_dense(x, "held_out")
        check_finite(x, "held_out")
        self.x, self.y = x.detach(), y.detach()
        self.target = check_number(target, "gap_target", 0, 1, above=True)
        self.every = check_count(every, "gap_every")
        self.cost = torch.tensor(0.0)
        self.train, self.held, self.best, self.train_at_best, self.need = (torch.tensor(float("nan")) for _ in range(5))
        self.steps = 0
        self._next = 0  # the first held-out point of the next measurement

    def due(self) -> bool:
        """Counts a step; whether to measure at it."""
        self.steps += 1
        return (self.steps - 1) % self.every == 0

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """The next held-out points, at most `size`, beginning again at the end."""
        indices = torch.arange(self._next, self._next + min(size, len(self.x)), device=self.x.device) % len(self.x)
        self._next = int((self._next + len(indices)) % len(self.x))
        return self.x[indices], self.y[indices]

    @torch.no_grad()
    def observe(self, train: Tensor, held: Tensor, size: int) -> None:
        """Takes one measurement of both robust accuracies, of `size` points each, and moves the radius."""
        for smoothed, value in ((self.train, train), (self.held, held)):
            value = value.to(smoothed.dtype)
            smoothed.copy_(torch.where(smoothed.isnan(), value, GAP_MEMORY * smoothed + (1 - GAP_MEMORY) * value))
        self.train_at_best.copy_(torch.where(self.held <= self.best, self.train_at_best, self.train))
        self.best.copy_(torch.fmax(self.best, self.held))
        gained = (self.train - self.train_at_best).clamp(min=0).nan_to_num(0.0)  # NaN in states of earlier versions
        self.cost.copy_((self.best - self.held - gained).clamp(min=0))
        # The standard error of the smoothed fraction; of all held-out points there is none to speak of.
        points = min(size, len(self.x)) * (1 + GAP_MEMORY) / (1 - GAP_MEMORY)
        unseen = max(0.0, 1 - min(size, len(self.x)) / len(self.x))
        error = (self.best * (1 - self.best) * unseen / points).clamp(min=0).sqrt()
        self.allowed.copy_(MAX_COST + 1 / len(self.x) + 2 * error)
        need = ((self.train - self.held - self.target) / self.target).clamp(-BACK, BACK)
        self.move(need, GAP_RATE, GAP_LEAD * (need - self.need).nan_to_num(0.0))
        self.need.copy_(need)

    def measured(self) -> dict[str, float]:
        """Metrics for a run: the state, and the smaller of need and headroom, which decides, as they were at the last measurement."""
        train, held = float(self.train), float(self.held)
        return {
            "hidden_radius": float(self.factor),
            "robust_train": train,
            "robust_held_out": held,
            "gap": train - held,
            "cost": float(self.cost),
            "allowed": float(self.allowed),
            "need": float(self.need),
            "headroom": float(1 - self.cost / self.allowed),
        }

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {**super().state_dict(), "steps": self.steps, "next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned."""
        super().load_state_dict(state)
        self.steps, self._next = int(state["steps"]), int(state["next"])
