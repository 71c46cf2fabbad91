"""Base class of probes: a small class around a pure function, with a schedule and a reduction across processes.

A probe of your own takes ten lines:

    class WeightNorm(Probe):
        name, reduction = "weights", "first"

        def measure(self, ctx):
            return {"norm": sum(p.square().sum() for p in ctx.model.parameters()).sqrt()}

Its values arrive in `run.frame()` as `weights/norm`. Keys that end in a layer's name, "norm/fc1", become
`weights/norm/fc1`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from excite._core.calls import Batch, Pick, call, own_copy
from excite._core.compatibility import renamed_names
from excite._core.intercept.affine import AffineCall, AffineMode, Names, clean_path
from excite._core.wrappers import eagerly
from excite.errors import InputError
from excite.probes.findings import Finding, MetricSeries, Panel
from excite.probes.layer_inputs import unit_rows
from excite.probes.schedules import Every, PowersOfTwo, Schedule, as_schedule
from excite.wiring.activations import UnitMode
from excite.wiring.normalization import Source, as_trained
from excite.wiring.tracing import Wiring, trace

Reduction = Literal["mean", "sum", "max", "min", "first"]
Values = Mapping[str, float | Tensor]

__all__ = [
    "Deferred",
    "Every",
    "LayerSignal",
    "Measurement",
    "PowersOfTwo",
    "Probe",
    "Reduction",
    "Schedule",
    "StepContext",
    "Values",
]

__getattr__ = renamed_names(__name__, {"Moment": "StepContext", "Signal": "LayerSignal"})


@dataclass
class StepContext:
    """The state of a training at one step, passed to probes. What several probes need is computed once.

    Args:
        model: The watched model; leave it unchanged.
        step: Optimizer steps so far; 0 before training.
        loss: The loss passed to `watch.step`, detached; None before training.
        example: The fixed example batch, if there is one.
        optimizer: The optimizer passed to `excite.watch`, if any.
        loss_node: The node of the loss in the autograd graph.
        wirings: Results of `wiring`, by the output picked.
        final: Whether this is the measurement at the end of the training.
        messages: Lines for the user; a probe may append some.
        artifacts: Results that the watch stores in the run as JSON, by name; a probe may add some.
        shared: What one probe computed at this step and others may use, by key.
        roles: What the parts of a transformer do, by their names in metrics (`Wiring.roles`), once a probe has traced the model.
        earlier: Values of earlier steps by full metric name, (step, values); a probe may append some for the run.

    Example:
        >>> ctx = StepContext(model, step=0, example=x)
        >>> [layer.name for layer in ctx.wiring().layers]
        ['0', '2']
    """

    model: nn.Module
    step: int
    loss: Tensor | None = None
    example: Batch | None = None
    optimizer: torch.optim.Optimizer | None = None
    loss_node: Any = None
    wirings: dict[str, Wiring] = field(default_factory=dict, repr=False)
    final: bool = False
    messages: list[str] = field(default_factory=list, repr=False)
    artifacts: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    shared: dict[str, Any] = field(default_factory=dict, repr=False)
    earlier: list[tuple[int, dict[str, float]]] = field(default_factory=list, repr=False)
    roles: Mapping[str, str] = field(default_factory=dict, repr=False)

    def wiring(self, output: Pick = None) -> Wiring:
        """The structure of the model (`excite.trace` on the example), shared by all probes of this step."""
        if self.example is None:
            raise InputError("this probe needs an example batch: excite.watch(model, example=x, ...)")
        if (key := repr(output)) not in self.wirings:
            self.wirings[key] = trace(self.model, self.example, output=output)
        return self.wirings[key]

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """The model's parameters by path, without the prefixes of wrappers; they share memory with the model."""
        return {clean_path(path): p for path, p in self.model.named_parameters()}

    @property
    def signals(self) -> list[LayerSignal]:
        """The input of every affine call on the example; `.active`, which points activate which unit, takes one pass more.

        One pass for all probes, of the function that training changes, without its noise: no dropout, and normalizations
        with the statistics of the example, unless they are frozen (`statistics`). The model is left as it was.
        """
        return self._pass[0]

    @property
    def statistics(self) -> dict[str, Source]:
        """Which statistics each normalization used in that pass, by name.

        "example", "running" for frozen ones, or "few": running ones, because the example has one value per channel.
        """
        return self._pass[1]

    @property
    def output(self) -> Any:
        """The model's output in that pass."""
        return self._pass[2]

    @cached_property
    def _pass(self) -> tuple[list[LayerSignal], dict[str, Source], Any]:
        if self.example is None:
            raise InputError("this probe needs an example batch: excite.watch(model, example=x, ...)")
        recorder = _Recorder(Names(self.model), _Units(self.model, self.example))
        statistics, output = _run(self.model, self.example, recorder)
        return recorder.signals, statistics, output


def _run(model: nn.Module, example: Batch, mode: AffineMode) -> tuple[dict[str, Source], Any]:
    with torch.no_grad(), as_trained(model, example) as statistics, mode:
        output = call(model, own_copy(example))
    return statistics.sources, output


class _Units:
    """Where the units of every affine call are active: a pass of its own, made on first use.

    It holds no reference to the context, whose memory is to be free as soon as the last probe is done with it.
    """

    def __init__(self, model: nn.Module, example: Batch):
        self._model, self._example = model, example

    @cached_property
    def _mode(self) -> UnitMode:
        mode = UnitMode(Names(self._model))
        with eagerly(self._model):
            _run(self._model, self._example, mode)
        return mode

    def positive(self, number: int, own: Callable[[], Tensor]) -> Tensor:
        return self._mode.positive(number, own)


@dataclass(frozen=True)
class LayerSignal:
    """The input of one affine call, and the call itself (weight, stride, padding, …)."""

    layer: str
    input: Tensor
    call: AffineCall = field(repr=False)
    units: Callable[[], Tensor] = field(repr=False)

    @property
    def positive(self) -> Tensor:
        """Where units are active, laid out like the output of the call.

        A unit is active where the input of its activation is positive, after a normalization, a residual sum or other operations between;
        where the output itself is, if no activation follows.
        """
        with torch.no_grad():
            return self.units()

    @property
    def active(self) -> Tensor | None:
        """Where units are active, as (points, units).

        The units of a convolution are its channels, its points are all patches. None for calls of which it is not known what one unit
        sees (transposed convolutions).
        """
        return unit_rows(self.call, self.input.shape, self.positive)


class _Recorder(AffineMode):
    def __init__(self, names: Names, units: _Units):
        super().__init__(names)
        self.signals: list[LayerSignal] = []
        self._units = units

    def visit(self, call: AffineCall) -> Tensor:
        # A copy: the model may change this tensor in place later.
        number, input, units = len(self.signals), call.input.clone(), self._units
        self.signals.append(
            LayerSignal(call.name, input, call, lambda: units.positive(number, lambda: call.run(input)))
        )
        return call.run(call.input)


def counted(statistics: Mapping[str, Source]) -> dict[str, float]:
    """How many normalizations used which statistics, as values of a probe: `statistics/example`, `running`, `few`."""
    return {f"statistics/{source}": float(count) for source, count in Counter(statistics.values()).items()}


@dataclass(frozen=True)
class Deferred:
    """Values of a measurement that are computed after the training step, off the training thread.

    Return one from `Probe.measure` where numbers would have to be fetched from a device, or where several measurements are
    cheaper together. `compute` must hold copies of what it reads: training continues meanwhile.

    Args:
        compute: Returns the values; may wait for the device.
        prepare: Called by the training thread before the values are written; `compute` is then called after it.
            Without it `compute` starts in the background as soon as the device has reached this point.
        on_device: Whether `compute` may wait for a device. If not, it is called by the training thread.
    """

    compute: Callable[[], Values]
    prepare: Callable[[], object] | None = None
    on_device: bool = True


Measurement = Values | Deferred | Future[Values]


class Probe:
    """Base class of all probes.

    A subclass sets `name` and defines `measure`; everything else is optional.

    Attributes:
        name: First part of the name of every metric.
        reduction: How the values of several processes become one: "mean", "sum", "max", "min" or "first". NaN does not count for
            "max" and "min".
        reductions: The same by quantity, where some need another reduction.
        requires: What `excite.watch` has to be given: "example", "optimizer".
        runs_model: False if `measure` does not run the model, which saves the preparations for that.
        at_end: Whether to measure at the end of the training even if that step was measured; other probes are measured at the end
            if it was not.
        panel: How its metrics are drawn.

    Args:
        schedule: When to measure: a schedule, or a number of steps. Default: every step.

    Example:
        >>> class WeightNorm(Probe):
        ...     name, reduction = "weights", "first"
        ...     def measure(self, ctx):
        ...         return {"norm": sum(p.square().sum() for p in ctx.model.parameters()).sqrt()}
    """

    name: ClassVar[str]
    reduction: ClassVar[Reduction] = "mean"
    runs_model: ClassVar[bool] = True  # False spares the preparations for that
    reductions: ClassVar[Mapping[str, Reduction]] = {}
    requires: ClassVar[tuple[str, ...]] = ()  # of "example" and "optimizer"
    at_end: ClassVar[bool] = False
    panel: ClassVar[Panel | None] = None

    def __init__(self, schedule: Schedule | None = None):
        self.schedule: Schedule = Every(1) if schedule is None else as_schedule(schedule, "schedule")

    @classmethod
    def default(cls, output: Pick = None) -> Probe | None:
        """The probe as `excite.watch` uses it by default; None if it is not among the defaults.

        Args:
            output: Which part of the model's return value is the output; see `excite.trace`.

        Returns:
            A new probe, or None.
        """
        return None

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Sentences about a run, from its metrics, for the report.

        Args:
            history: The metrics of the run: `history["weights/norm"]` is one series, `history.layers(...)` one per layer.

        Returns:
            The findings; an empty list if there is nothing to say.
        """
        return []

    def attach(self, ctx: StepContext) -> None:
        """Called once before training.

        Args:
            ctx: The model and what `excite.watch` was given, at step 0.
        """

    def detach(self) -> None:
        """Called once at the end, also after an exception: leave nothing behind."""

    def announce(self, due: bool) -> None:
        """Called after every step. A probe with hooks can rest until a step is measured.

        Args:
            due: Whether the next step will be measured.
        """

    def measure(self, ctx: StepContext) -> Measurement:
        """Measures the quantity at one step. Must not wait for a device.

        Args:
            ctx: The model, the loss and the number of steps.

        Returns:
            Values by quantity or quantity/layer, as numbers or tensors with one element; or a `Deferred` computation of them.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define measure(self, ctx)")

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint.

        Returns:
            A nested dict of tensors and plain values.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint.

        Args:
            state: What `state_dict` returned.
        """
