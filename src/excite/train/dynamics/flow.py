"""Gradient flow of a model: dθ/dt = −∇R(θ), integrated in float64 with control of the error.

At the kink of a ReLU the gradient jumps. A step is taken with the smooth continuation of the loss on its own side of all
kinks; if it ends beyond one, the crossing is located on the step's interpolant, to the rounding of the switching values, and the
flow restarts there on the other side. At kinks that are not recognized (`where`) steps shorten instead.

Where the flows of both sides lead to the kink, the path slides along it (`excite.train.dynamics.sliding`): it follows the
gradient of the loss on the surface of the kink until it leaves it on one side. Where even that makes no progress (more than eight
kinks at once, kinks of max pooling or others that are not recognized) it takes plain descent steps of length `shortest`, which
zigzag around the path and count in `FlowResult.slides`, `FlowResult.slack` and `FlowResult.squares`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Literal

import numpy as np
import torch
from scipy import integrate
from torch import Tensor, nn

from excite._core.checks import check_count, is_whole, shown, to_array
from excite._core.compatibility import renamed_keywords
from excite._core.preserve import preserve_random_state
from excite.errors import InputError, TrainingStopped
from excite.train.dynamics.kinks import Side, first_crossing, left_side, sides
from excite.train.dynamics.objective import Array, Field, FlowRecorder, FlowResult, Loss, Quantity, Status, positive
from excite.train.dynamics.sliding import MAX_SURFACES, Place, corrected, leaving, mask, released, tangent

METHODS: dict[str, Any] = {name: getattr(integrate, name) for name in ("DOP853", "RK45", "LSODA", "Radau", "BDF")}
Clock = Literal["time", "length"]
Slope = Callable[[float, Array], Array]
SolverFrom = Callable[[Slope, float, Array, float | None], Any]
_SHORT = 25  # short steps in a row before a path counts as sliding: to cross a kink that is not seen takes about ten
_STUCK = 4  # crossings in a row without any progress before it does
_LEAVING = 1e-8  # of the product of norms: a speed at which sliding ends; above what counts as no speed
_SECTIONS = 8  # parts of a step at whose ends kinks are looked for
_SLIDE = 20  # descent steps before error control is tried again; doubled as long as that fails


@renamed_keywords(most="max_steps")
def gradient_flow(
    model: nn.Module,
    loss: Loss,
    time: float,
    *,
    at: int | Sequence[float] | Array = 50,
    quantities: Mapping[str, Quantity] | None = None,
    clock: Clock = "time",
    method: str = "DOP853",
    rtol: float = 1e-9,
    atol: float = 1e-12,
    shortest: float | None = None,
    tolerance: float = 0.0,
    max_steps: int = 100_000,
) -> FlowResult:
    """Integrates gradient flow dθ/dt = −∇R(θ) from the model's weights, with R(θ) = `loss(model)`.

    Runs in float64 on a copy of the model; data in `loss` has to be float64 too. The integrator keeps the error of each step
    below atol + rtol · |θ|. Kinks of ReLU-like functions, `abs`, `clamp`, `maximum` and max pooling are located and crossed
    (`FlowResult.crossings`); where the flows of both sides lead to a kink, the path slides along it (`FlowResult.sliding`).
    The module's docstring has the method and its limits.

    Args:
        model: Model whose weights are the starting point; left unchanged.
        loss: Function of the model, such as `lambda m: mse(m(x), y)`.
        time: Length of the flow, in units of `clock`.
        at: Times to record, or their number, evenly spaced from 0 to `time`.
        quantities: Functions of the model to record, by name, beside the loss and the norm of its gradient.
        clock: "time", or "length": the same path, parametrized by dθ/ds = −∇R ‖θ‖ / ‖∇R‖, so that s counts e-folds of
            relative length. It reaches norms for which the time would be astronomic. Only the direction of the gradient
            matters then: use the logarithm of a loss that underflows.
        method: scipy's integrator: "DOP853" (explicit, order 8), "RK45", or "LSODA", "Radau" and "BDF" for stiff problems.
        rtol: Relative error per step.
        atol: Absolute error per step.
        shortest: Length of descent steps where sliding makes no progress. Default: a 20,000th of `time`.
        tolerance: Stop where ‖∇R‖ falls to this value.
        max_steps: Maximum number of steps.

    Returns:
        Recorded quantities, the final model, and how the flow ended.

    Raises:
        InputError: If an argument is invalid.
        TrainingStopped: If the loss or its gradient is not finite.

    Example:
        >>> x, y = x.double(), y[:, None].double()
        >>> flow = gradient_flow(model, lambda m: (m(x) - y).square().mean(), time=0.1)
        >>> flow.values["loss"]
    """
    end, max_steps = positive("time", time), check_count(max_steps, "max_steps")
    _check_names(method, clock)
    tolerance = positive("tolerance", tolerance, zero=True)
    rtol, atol = positive("rtol", rtol), positive("atol", atol, zero=True)
    field = Field(model, loss)
    walk = _Walk(
        field=field, clock=clock, record=FlowRecorder(field, quantities), moments=_moments(at, end), point=field.start,
        end=end, shortest=end / 20_000 if shortest is None else positive("shortest", shortest), max_steps=max_steps,
        tolerance=tolerance, solver_from=_solver(method, end, rtol, atol),
    )  # fmt: skip
    return walk.result()


def _check_names(method: str, clock: str) -> None:
    if method not in METHODS:
        raise InputError(f"method: expected one of {', '.join(METHODS)}; got {method!r}")
    if clock not in ("time", "length"):
        raise InputError(f"clock: expected 'time' or 'length'; got {clock!r}")


def _solver(method: str, end: float, rtol: float, atol: float) -> SolverFrom:
    """Makes scipy's integrator of a slope from a time and a point, with its first step or None."""

    def start(slope: Slope, begin: float, point: Array, first: float | None) -> Any:
        return METHODS[method](slope, begin, point, end, rtol=rtol, atol=atol, first_step=first)

    return start


def _slope(field: Field, clock: Clock, side: Side | None, surfaces: Sequence[Place] = ()) -> Slope:
    """−∇R, or with clock "length" its direction times ‖θ‖; on one side of all kinks, or along those that are held."""

    def slope(_: float, point: Array) -> Array:
        if surfaces and side is not None:
            gradient = tangent(*field.gradients(point, side, surfaces)[1:])
        else:
            gradient = field.gradient(point, side)[1]
        if clock == "time":
            return -gradient
        norm = float(np.linalg.norm(gradient))
        return -gradient * (float(np.linalg.norm(point)) / norm) if norm > 0 else np.zeros_like(gradient)

    return slope


def _any(left: Sequence[Tensor]) -> bool:
    return any(bool(mask.any()) for mask in left)


@dataclass
class _Walk:
    """Where a flow is, what it has taken to get there, and which moments are still to be recorded.

    `side`: on which side of each kink it is; `surfaces`: the kinks along which it slides.
    """

    field: Field
    clock: Clock
    record: FlowRecorder
    moments: list[float]
    point: Array
    end: float
    shortest: float
    max_steps: int
    tolerance: float
    solver_from: SolverFrom
    time: float = 0.0
    steps: int = 0
    slides: int = 0
    crossings: int = 0
    sliding: float = 0.0
    outside: bool = False  # whether a gradient was taken beyond a kink since the last step
    side: Side = dataclass_field(default_factory=list)
    surfaces: tuple[Place, ...] = ()

    def __post_init__(self) -> None:
        self.squares = np.zeros_like(self.point)  # Σ (η ∂R)² of plain descent, by weight

    def result(self) -> FlowResult:
        """The flow, followed to its end."""
        with preserve_random_state(self.field.model):  # a loss may seed the generators
            status = self.go()
            return self.record.result(
                self.point, status, self.steps, self.squares, self.slides, self.crossings, self.sliding
            )

    def go(self) -> Status:
        """To the end, from kink to kink by steps with error control; where these make no progress, by plain descent."""
        self._write(lambda _: self.point)
        solver = self._restarted()
        short, stuck, patience = 0, 0, _SLIDE
        while solver.status == "running":
            if self.tolerance and self._rests():
                return self._stop("converged")
            if self.steps == self.max_steps:
                return self._stop("too many steps")
            before, slid, restart = self.time, bool(self.surfaces), self._step(solver)
            moved = self.time - before
            self.sliding += moved if slid else 0.0
            short = short + 1 if moved < self.shortest else 0
            stuck = stuck + 1 if restart and moved < 1e-6 * self.shortest else 0
            patience = patience if short else _SLIDE
            if self.time >= self.end:
                return "finished"
            if short >= _SHORT or stuck >= _STUCK:
                patience, short, stuck = 2 * patience, 0, 0
                self._slide(patience)
                solver = self._restarted()
            elif restart:
                solver = self._restart(solver.step_size)
        return "finished"

    def _rests(self) -> bool:
        slope = _slope(self.field, "time", self.side, self.surfaces)
        return float(np.linalg.norm(slope(self.time, self.point))) <= self.tolerance

    def _restarted(self) -> Any:
        """A solver on the side of all kinks on which the flow is now."""
        self.side, self.surfaces = [sides(value, None) for value in self.field.switching(self.point)], ()
        return self._restart(None)

    def _restart(self, size: float | None) -> Any:
        first = None if size is None else min(max(size, self.shortest), self.end - self.time)
        slope, side, on_surface = (
            _slope(self.field, self.clock, self.side, self.surfaces),
            self.side,
            mask(self.side, self.surfaces),
        )

        def watched(time: float, point: Array) -> Array:
            velocity = slope(time, point)
            self.outside = self.outside or _any(left_side(self.field.last, side, on_surface))
            return velocity

        return self.solver_from(watched if side else slope, self.time, self.point.copy(), first)

    def _step(self, solver: Any) -> bool:
        """One step, or as much of it as is before the first kink or the end of sliding; whether to start again from there."""
        self.outside = False
        message = solver.step()
        self.steps += 1
        if solver.status == "failed":
            raise TrainingStopped(f"gradient flow stopped at {solver.t:.6g} of {self.end:.6g}: {message}")
        start, end, between = self.time, float(solver.t), None
        on_surface = mask(self.side, self.surfaces)
        values = self.field.switching(np.asarray(solver.y, dtype=np.float64)) if self.side else []
        gone = left_side(values, self.side, on_surface)
        restart = crossed = _any(gone)
        if crossed or self.outside:  # a stage beyond a kink: the path may have been there and come back
            between = solver.dense_output()
            for end_of_part in np.linspace(start, end, _SECTIONS + 1)[1:]:
                if _any(left_side(self.field.switching(np.asarray(between(end_of_part))), self.side, on_surface)):
                    end, gone = self._crossing(between, start, float(end_of_part), on_surface)
                    restart = crossed = True
                    break
        if self.surfaces and self._leaves(solver.y if between is None else between(end)):
            between = solver.dense_output() if between is None else between
            end, restart, crossed = self._departure(between, start, end), True, False
        if between is None and self.moments and self.moments[0] <= end:
            between = solver.dense_output()
        self.time = end
        self.point = np.array(solver.y if between is None else between(end), dtype=np.float64)
        if between is not None:
            self._write(between)
        if restart:
            self._sort(gone if crossed else [])
        return restart

    def _sort(self, gone: Sequence[Tensor]) -> None:
        """Cross the kinks that were reached, slide along those that cannot be crossed, leave those that can be left."""
        new = [(i, int(j)) for i, mask in enumerate(gone) for j in mask.reshape(-1).nonzero().reshape(-1)]
        self.crossings += len(new)
        if self.surfaces:
            self.point = corrected(self.field, self.point, self.side, self.surfaces)
        real = all(self.side[call].dtype == torch.bool for call, _ in new)
        if real and len(new) + len(self.surfaces) <= MAX_SURFACES:
            self.side, self.surfaces = released(self.field, self.point, self.side, (*self.surfaces, *new))
        else:
            self.side, self.surfaces = [sides(value, None) for value in self.field.switching(self.point)], ()

    def _leaves(self, point: Any) -> bool:
        return leaving(self.field, np.asarray(point, dtype=np.float64), self.side, self.surfaces) > _LEAVING

    def _crossing(
        self, between: Callable[[float], Any], low: float, high: float, masks: Sequence[Tensor]
    ) -> tuple[float, list[Tensor]]:
        """The first moment at which a switching value has left its side, to rounding, and which.

        By linear interpolation between the ends of an interval that shrinks, halved where that is slow.
        """
        at_low, at_high = (self.field.switching(np.asarray(between(t))) for t in (low, high))
        gone = left_side(at_high, self.side, masks)
        for turn in range(200):
            width = high - low
            if width <= 4 * np.spacing(max(abs(low), abs(high))):
                break
            fraction = first_crossing(at_low, at_high, gone) if turn % 3 < 2 else 0.5
            # A little beyond the estimate in turn: then both ends close in.
            fraction = min(max(fraction * (1.0 + 1e-3 * (turn % 2)), 1e-9), 1 - 1e-9)
            middle = low + fraction * width
            if not low < middle < high:
                break
            values = self.field.switching(np.asarray(between(middle)))
            left = left_side(values, self.side, masks)
            if _any(left):
                high, at_high, gone = middle, values, left
            else:
                low, at_low = middle, values
        return high, gone

    def _departure(self, between: Callable[[float], Any], low: float, high: float) -> float:
        """When sliding ends. The flow does not jump there, so that an error of the moment counts with its square only."""
        width = high - low
        while high - low > 1e-6 * width:
            middle = (low + high) / 2
            low, high = (low, middle) if self._leaves(between(middle)) else (middle, high)
        return high

    def _slide(self, count: int) -> None:
        """Plain descent, where neither crossing nor sliding makes progress."""
        slope = _slope(self.field, self.clock, None)
        for _ in range(count):
            if self.time + self.shortest >= self.end or self.steps == self.max_steps:
                return
            move = self.shortest * slope(self.time, self.point)
            self.point, self.time = self.point + move, self.time + self.shortest
            self.steps, self.slides, self.squares = self.steps + 1, self.slides + 1, self.squares + move**2
            self._write(lambda _: self.point)

    def _write(self, between: Callable[[float], Any]) -> None:
        """Record all moments up to now; `between` gives the point at a moment."""
        while self.moments and self.moments[0] <= self.time:
            moment_time = self.moments.pop(0)
            self.record.add(moment_time, np.asarray(between(moment_time), dtype=np.float64))

    def _stop(self, status: Status) -> Status:
        self.record.add(self.time, self.point)
        return status


def _moments(at: int | Sequence[float] | Array, end: float) -> list[float]:
    if is_whole(at):
        return [float(t) for t in np.linspace(0.0, end, check_count(at, "at") + 1)]
    moments = to_array("at", at)
    good = moments.ndim == 1 and len(moments) and (np.diff(moments) >= 0).all()
    if not good or not 0 <= moments[0] <= moments[-1] <= end:
        raise InputError(f"at: expected how many, or growing times from 0 to {end:g}; got {shown(at)}")
    return [float(t) for t in moments]
