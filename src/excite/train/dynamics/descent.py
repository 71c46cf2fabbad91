"""Gradient descent with the step size of appendix F of Training invariances."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from torch import nn

from excite._core.checks import check_count
from excite._core.preserve import preserve_random_state
from excite.bounds.stability import largest_eigenvalue
from excite.errors import TrainingStopped
from excite.train.dynamics.objective import Field, FlowRecorder, FlowResult, Loss, Quantity, Status, positive


def descent(
    model: nn.Module,
    loss: Loss,
    steps: int,
    *,
    step: float | None = None,
    refresh: int = 20,
    every: int = 1,
    quantities: Mapping[str, Quantity] | None = None,
    tolerance: float = 0.0,
) -> FlowResult:
    """Takes steps θ ← θ − η ∇R(θ) of gradient descent with η = min(1, 1/β), where R(θ) = `loss(model)`.

    β is the largest eigenvalue of the Hessian, by Lanczos, every `refresh` steps. That is the smoothness at a point; the
    theorem needs it along the step, so η is halved until R falls by at least η/2 ‖∇R‖² (equation 87). What the appendix
    concludes from that then holds whatever β was: `slack` = Σ η² ‖∇R‖² ≤ 2 (R(0) − R(end)), and no entry of
    Σ η² ∂R/∂w_e ∂R/∂w_f exceeds it. Runs in float64 on a copy of the model.

    Args:
        model: Model whose weights are the starting point; left unchanged.
        loss: Function of the model.
        steps: Number of steps.
        step: Fixed step size, used without any test. Default: the step size above, recorded as "step".
        refresh: Steps between estimates of β.
        every: Steps between records; the start and the end are always recorded.
        quantities: Functions of the model to record, by name.
        tolerance: Stop where ‖∇R‖ falls to this value.

    Returns:
        Recorded quantities, the final model, and how the descent ended.

    Raises:
        InputError: If an argument is invalid.
        TrainingStopped: If the loss is not finite, or no step reduces it.

    Example:
        >>> x, y = x.double(), y[:, None].double()
        >>> result = descent(model, lambda m: (m(x) - y).square().mean(), steps=5)
        >>> result.steps, result.loss < float(result.values["loss"][0])
        (5, True)
    """
    steps, refresh, every = check_count(steps, "steps"), check_count(refresh, "refresh"), check_count(every, "every")
    fixed = None if step is None else positive("step", step)
    tolerance = positive("tolerance", tolerance, zero=True)
    field = Field(model, loss)
    with preserve_random_state(field.model):  # a loss may seed the generators
        return _descend(field, steps, fixed, refresh, every, quantities or {}, tolerance)


def _descend(
    field: Field,
    steps: int,
    fixed: float | None,
    refresh: int,
    every: int,
    quantities: Mapping[str, Quantity],
    tolerance: float,
) -> FlowResult:
    last = [fixed if fixed is not None else 0.0]
    record = FlowRecorder(field, {**quantities, "step": lambda m: last[0]})
    point, smoothness, squares = field.start, 0.0, np.zeros_like(field.start)
    status: Status = "finished"
    taken = 0
    for number in range(steps):
        value, gradient = field.gradient(point)
        square = float(gradient @ gradient)
        if tolerance and math.sqrt(square) <= tolerance:
            status = "converged"
            break
        if fixed is not None:
            size, after = fixed, point - fixed * gradient
        else:
            if number % refresh == 0:
                smoothness = largest_eigenvalue(field.tensor(point), field.parameters, tolerance=1e-3).value
            size = min(1.0, 1.0 / smoothness) if smoothness > 0 else 1.0
            after = point - size * gradient
            # Rounding of R hides decreases below its last digits: near a minimum the test would never pass.
            rounding = 4 * np.finfo(np.float64).eps * abs(value)
            while not field.value(after) - value <= -size / 2 * square + rounding:
                size /= 2
                if size < 1e-300:
                    raise TrainingStopped(f"no step reduces the loss {value:.6g}, gradient {square**0.5:.3g}")
                after = point - size * gradient
        last[0] = size
        if number % every == 0:
            record.add(float(number), point)
        point = after
        squares += (size * gradient) ** 2
        taken += 1
    record.add(float(taken), point)
    return record.result(point, status, taken, squares)
