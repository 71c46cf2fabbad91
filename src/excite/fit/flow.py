"""Gradient flow of a model: dθ/dt = −∇R(θ), integrated in float64 with control of the error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import integrate
from torch import nn

from excite.errors import InputError, TrainingStopped
from excite.fit.course import Array, Course, Field, Loss, Quantity, Record, Status, positive, whole

METHODS: dict[str, Any] = {name: getattr(integrate, name) for name in ("DOP853", "RK45", "LSODA", "Radau", "BDF")}
Clock = Literal["time", "length"]
Slope = Callable[[float, Array], Array]
_SHORT = 25  # short steps in a row before a path counts as sliding: to cross a kink takes about ten
_SLIDE = 20  # descent steps before error control is tried again; doubled as long as that fails


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
    most: int = 100_000,
) -> Course:
    """Follow dθ/dt = −∇R(θ) from the model's weights for `time`; R(θ) = `loss(model)`, as in `lambda m: mse(m(x), y)`.

    The integrator (scipy's; DOP853 is explicit of order 8, LSODA and Radau are for stiff problems) keeps the error of
    each step below atol + rtol · |θ|. At the kink of a ReLU autograd takes one element of the subdifferential, and steps
    shorten where the path crosses one. Where the path slides along a kink, which gradient flow of ReLU networks does, no
    step is short enough for the error control: there it takes plain descent steps of length `shortest` (a 20,000th of
    the time by default). They zigzag around the sliding path, and count in `Course.slides` and `Course.slack`.

    Args:
        at: times to record, or so many, evenly from 0 to `time`; what is recorded is `quantities`, each a function of the
            model, beside the loss and the norm of its gradient.
        clock: "time", or "length": the same path, walked by dθ/ds = −∇R ‖θ‖ / ‖∇R‖, so that s counts e-folds of
            relative length. It reaches norms for which "time" would have to be astronomic. Since only the direction
            matters, give the logarithm of a loss that underflows.
        tolerance: stop where ‖∇R‖ falls to it. `most`: steps at most.

    The model is copied to float64 and left as it was; data in `loss` has to be float64 too.
    """
    end, most = positive("time", time), whole("most", most)
    if method not in METHODS:
        raise InputError(f"method: expected one of {', '.join(METHODS)}; got {method!r}")
    if clock not in ("time", "length"):
        raise InputError(f"clock: expected 'time' or 'length'; got {clock!r}")
    tolerance = positive("tolerance", tolerance, zero=True)
    field = Field(model, loss)
    walk = _Walk(
        slope=_slope(field, clock),
        record=Record(field, quantities),
        moments=_moments(at, end),
        point=field.start,
        end=end,
        shortest=end / 20_000 if shortest is None else positive("shortest", shortest),
        most=most,
        solver_from=lambda slope, begin, point: METHODS[method](slope, begin, point, end, rtol=rtol, atol=atol),
    )
    status = walk.go(lambda point: bool(tolerance) and float(np.linalg.norm(field.gradient(point)[1])) <= tolerance)
    return walk.record.course(walk.point, status, walk.steps, walk.slack, walk.slides)


def _slope(field: Field, clock: Clock) -> Slope:
    """−∇R, or with clock "length" its direction times ‖θ‖."""

    def slope(_: float, point: Array) -> Array:
        gradient = field.gradient(point)[1]
        if clock == "time":
            return -gradient
        norm = float(np.linalg.norm(gradient))
        return -gradient * (float(np.linalg.norm(point)) / norm) if norm > 0 else np.zeros_like(gradient)

    return slope


@dataclass
class _Walk:
    """Where a flow is, what it has taken to get there, and which moments are still to be recorded."""

    slope: Slope
    record: Record
    moments: list[float]
    point: Array
    end: float
    shortest: float
    most: int
    solver_from: Callable[[Slope, float, Array], Any]
    now: float = 0.0
    steps: int = 0
    slides: int = 0
    slack: float = 0.0

    def go(self, converged: Callable[[Array], bool]) -> Status:
        """To the end, by steps with error control; where they stay short, the path slides along a kink."""
        solver = self.solver_from(self.slope, 0.0, self.point.copy())
        self._write(lambda _: self.point)
        short, patience = 0, _SLIDE
        while solver.status == "running":
            if converged(self.point):
                return self._stop("converged")
            if self.steps == self.most:
                return self._stop("too many steps")
            self._step(solver)
            short = short + 1 if solver.step_size < self.shortest else 0
            patience = patience if short else _SLIDE
            if short >= _SHORT and solver.status == "running":
                patience, short = 2 * patience, 0
                self._slide(patience)
                solver = self.solver_from(self.slope, self.now, self.point.copy())
        return "finished"

    def _step(self, solver: Any) -> None:
        message = solver.step()
        self.steps += 1
        if solver.status == "failed":
            raise TrainingStopped(f"gradient flow stopped at {solver.t:.6g} of {self.end:.6g}: {message}")
        self.now, self.point = float(solver.t), np.asarray(solver.y, dtype=np.float64).copy()
        if self.moments and self.moments[0] <= self.now:
            self._write(solver.dense_output())

    def _slide(self, count: int) -> None:
        """Plain descent: no step along a kink is short enough for the error control."""
        for _ in range(count):
            if self.now + self.shortest >= self.end or self.steps == self.most:
                return
            move = self.shortest * self.slope(self.now, self.point)
            self.point, self.now = self.point + move, self.now + self.shortest
            self.steps, self.slides, self.slack = self.steps + 1, self.slides + 1, self.slack + float(move @ move)
            self._write(lambda _: self.point)

    def _write(self, between: Callable[[float], Any]) -> None:
        """Record all moments up to now; `between` gives the point at a moment."""
        while self.moments and self.moments[0] <= self.now:
            moment = self.moments.pop(0)
            self.record.add(moment, np.asarray(between(moment), dtype=np.float64))

    def _stop(self, status: Status) -> Status:
        self.record.add(self.now, self.point)
        return status


def _moments(at: int | Sequence[float] | Array, end: float) -> list[float]:
    if isinstance(at, int) and not isinstance(at, bool):
        return [float(t) for t in np.linspace(0.0, end, whole("at", at) + 1)]
    moments = np.asarray(at, dtype=np.float64)
    good = moments.ndim == 1 and len(moments) and (np.diff(moments) >= 0).all()
    if not good or not 0 <= moments[0] <= moments[-1] <= end:
        raise InputError(f"at: expected how many, or growing times from 0 to {end:g}; got {at!r}")
    return [float(t) for t in moments]
