"""Gradient flow of a model: dθ/dt = −∇R(θ), integrated in float64 with control of the error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from scipy import integrate
from torch import nn

from excite.errors import InputError, TrainingStopped
from excite.fit.course import Array, Course, Field, Loss, Quantity, Record, Status, positive, whole

METHODS: dict[str, Any] = {name: getattr(integrate, name) for name in ("DOP853", "RK45", "LSODA", "Radau", "BDF")}
Clock = Literal["time", "length"]
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
    record = Record(field, quantities)
    moments = _moments(at, end)

    def slope(_: float, point: Array) -> Array:
        gradient = field.gradient(point)[1]
        if clock == "time":
            return -gradient
        norm = float(np.linalg.norm(gradient))
        return -gradient * (float(np.linalg.norm(point)) / norm) if norm > 0 else np.zeros_like(gradient)

    def solver_from(begin: float, point: Array) -> Any:
        return METHODS[method](slope, begin, point.copy(), end, rtol=rtol, atol=atol)

    shortest = end / 20_000 if shortest is None else positive("shortest", shortest)
    solver = solver_from(0.0, field.start)
    while moments and moments[0] <= 0.0:
        record.add(moments.pop(0), field.start)
    status: Status = "finished"
    steps, slides, slack = 0, 0, 0.0
    short, patience = 0, _SLIDE
    point = field.start
    while solver.status == "running":
        if tolerance and float(np.linalg.norm(field.gradient(point)[1])) <= tolerance:
            status = "converged"
            break
        if steps == most:
            status = "too many steps"
            break
        message = solver.step()
        steps += 1
        if solver.status == "failed":
            raise TrainingStopped(f"gradient flow stopped at {solver.t:.6g} of {end:.6g}: {message}")
        point = np.asarray(solver.y, dtype=np.float64).copy()
        if moments and moments[0] <= solver.t:
            between = solver.dense_output()
            while moments and moments[0] <= solver.t:
                moment = moments.pop(0)
                record.add(moment, np.asarray(between(moment), dtype=np.float64))
        short = short + 1 if solver.step_size < shortest else 0
        patience = patience if short else _SLIDE
        if short >= _SHORT and solver.status == "running":
            now, patience, short = float(solver.t), 2 * patience, 0
            for _ in range(patience):
                if now + shortest >= end or steps == most:
                    break
                move = shortest * slope(now, point)
                point, now = point + move, now + shortest
                steps, slides, slack = steps + 1, slides + 1, slack + float(move @ move)
                while moments and moments[0] <= now:
                    record.add(moments.pop(0), point)
            solver = solver_from(now, point)
    if status != "finished":
        record.add(float(solver.t), point)
    return record.course(point, status, steps, slack, slides)


def _moments(at: int | Sequence[float] | Array, end: float) -> list[float]:
    if isinstance(at, int) and not isinstance(at, bool):
        return [float(t) for t in np.linspace(0.0, end, whole("at", at) + 1)]
    moments = np.asarray(at, dtype=np.float64)
    good = moments.ndim == 1 and len(moments) and (np.diff(moments) >= 0).all()
    if not good or not 0 <= moments[0] <= moments[-1] <= end:
        raise InputError(f"at: expected how many, or growing times from 0 to {end:g}; got {at!r}")
    return [float(t) for t in moments]
