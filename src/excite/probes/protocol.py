"""What a probe is: a small class around a pure function, with a schedule and a reduction across processes.

A probe of your own takes ten lines:

    class WeightNorm(Probe):
        name, reduction = "weights", "first"

        def measure(self, now):
            return {"norm": sum(p.square().sum() for p in now.model.parameters()).sqrt()}

Its values arrive in `run.frame()` as `weights/norm`. Keys that end in a layer's name, "norm/fc1", become
`weights/norm/fc1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from excite.errors import InputError
from excite.probes.schedules import Every, PowersOfTwo, Schedule
from excite.wiring.affine import AffineCall, AffineMode, Names
from excite.wiring.calling import Batch, Pick, call, own_copy
from excite.wiring.tracing import Wiring, trace
from excite.wiring.untouched import evaluating

Reduction = Literal["mean", "sum", "max", "min", "first"]
Values = Mapping[str, float | Tensor]

__all__ = ["Every", "Moment", "PowersOfTwo", "Probe", "Reduction", "Schedule", "Signal", "Values"]


@dataclass
class Moment:
    """What probes can see at one step. What several probes need is computed once."""

    model: nn.Module
    step: int
    loss: Tensor | None = None
    example: Batch | None = None
    optimizer: torch.optim.Optimizer | None = None
    loss_node: Any = None  # the loss's node in the autograd graph, for probes that ask how the loss was made
    wirings: dict[str, Wiring] = field(
        default_factory=dict, repr=False
    )  # those found at this moment, by what was picked

    def wiring(self, output: Pick = None) -> Wiring:
        """What the model is made of (`excite.trace` on the example), for all probes that ask at this moment."""
        if self.example is None:
            raise InputError("this probe needs an example batch: excite.watch(model, example=x, ...)")
        if (key := repr(output)) not in self.wirings:
            self.wirings[key] = trace(self.model, self.example, output=output)
        return self.wirings[key]

    @cached_property
    def signals(self) -> list[Signal]:
        """The input of every affine call on the example, in evaluation mode; the model is left as it was."""
        if self.example is None:
            raise InputError("this probe needs an example batch: excite.watch(model, example=x, ...)")
        recorder = _Recorder(Names(self.model))
        with torch.no_grad(), evaluating(self.model), recorder:
            call(self.model, own_copy(self.example))
        return recorder.signals


@dataclass(frozen=True)
class Signal:
    """The input of one affine call, and the call itself (weight, stride, padding, …)."""

    layer: str
    input: Tensor
    call: AffineCall = field(repr=False)


class _Recorder(AffineMode):
    def __init__(self, names: Names):
        super().__init__(names)
        self.signals: list[Signal] = []

    def visit(self, call: AffineCall) -> Tensor:
        # A copy: the model may go on to change this tensor in place.
        self.signals.append(Signal(call.name, call.input.clone(), call))
        return call.run(call.input)


class Probe:
    """Base of all probes. `name` is the first part of every metric's name.

    Several processes: `reduction` makes one value out of theirs; `reductions` by quantity, where some need another one.
    "max" and "min" are those of the processes that have a value: NaN does not count.
    """

    name: ClassVar[str]
    reduction: ClassVar[Reduction] = "mean"
    runs_model: ClassVar[bool] = True  # False spares the preparations for that
    reductions: ClassVar[Mapping[str, Reduction]] = {}

    def __init__(self, schedule: Schedule | None = None):
        self.schedule: Schedule = schedule or Every(1)

    def attach(self, now: Moment) -> None:
        """Called once before training."""

    def detach(self) -> None:
        """Called once at the end, also after an exception: leave nothing behind."""

    def announce(self, due: bool) -> None:
        """Called after every step: whether the coming one will be measured. A probe with hooks can rest until then."""

    def measure(self, now: Moment) -> Values | Future[Values]:
        """Values by quantity, or by quantity/layer; or a promise of them, which is asked for when they are written."""
        raise NotImplementedError(f"{type(self).__name__} has to define measure(self, now)")

    def state_dict(self) -> dict[str, Any]:
        """What has to survive a restart, as a nested dict of tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass
