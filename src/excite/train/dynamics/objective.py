"""The loss of a model as a function of one vector in float64, and what is recorded while that vector moves."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from excite._core.checks import check_dense, check_model, check_number, check_real, check_weights, first_line, shown
from excite._core.preserve import RandomState, device_of, preserve_state
from excite._core.wrappers import eagerly, refuse_lazy, unwrap
from excite.errors import ExciteError, InputError, ModelError, TrainingStopped
from excite.train.dynamics.kinks import Kinks, Side

Array = NDArray[np.float64]
Loss = Callable[[nn.Module], Tensor]
Quantity = Callable[[nn.Module], "float | Tensor | Array"]
Status = Literal["converged", "finished", "too many steps"]


@dataclass(frozen=True)
class FlowResult:
    """Result of `gradient_flow` and `descent`.

    Attributes:
        times: Flow time, or number of steps, of each record, (K,).
        values: Recorded quantities by name, (K, ...) each; always "loss" and "gradient" (the norm of the gradient).
        model: Copy of the model in float64 with the last weights.
        status: "converged" if the norm of the gradient fell to the tolerance, "finished" if the end was reached, else
            "too many steps".
        loss: Loss at the last weights.
        gradient: Norm of the gradient at the last weights.
        steps: Number of steps.
        evaluations: Number of evaluations of the gradient.
        slack: Σ η² ‖∇R‖² over steps of plain descent, by which conserved quantities may have moved.
        squares: The same sum for every entry of every parameter, by name: a channel's law moves by Σ over the rows of its producers minus
            Σ over those of its consumers.
        slides: Number of descent steps that a flow took because it slid along kinks that it could not follow.
        crossings: Number of kinks that a flow crossed.
        sliding: Flow time spent sliding along kinks.

    Example:
        >>> x, y = x.double(), y[:, None].double()
        >>> flow = gradient_flow(model, lambda m: (m(x) - y).square().mean(), time=0.1)
        >>> flow.status, flow.loss < float(flow.values["loss"][0])
        ('finished', True)
    """

    times: Array
    values: Mapping[str, Array]
    model: nn.Module
    status: Status
    loss: float
    gradient: float
    steps: int
    evaluations: int
    slack: float = 0.0
    slides: int = 0
    crossings: int = 0
    sliding: float = 0.0
    squares: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def converged(self) -> bool:
        """Whether the norm of the gradient fell to the tolerance."""
        return self.status == "converged"

    def __str__(self) -> str:
        end = f"{self.times[-1]:.6g}" if len(self.times) else "the start"
        return (
            f"{self.status} at {end}: loss {self.loss:.6g}, gradient {self.gradient:.3g}, "
            f"{self.steps} steps, {self.evaluations} gradients"
            + (f", slid along kinks for {self.sliding:.3g}" if self.sliding else "")
            + (f", {self.slides} slides" if self.slides else "")
        )


class Field:
    """`loss(model)` and its gradient as functions of one vector of all parameters that ask for a gradient."""

    def __init__(self, model: nn.Module, loss: Loss):
        refuse_lazy(check_model(model))
        check_weights(model)
        self.model = copy.deepcopy(unwrap(model)).double()
        self._loss = loss
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        if not self._parameters:
            raise ModelError("no parameter has requires_grad=True: there is nothing to integrate")
        self.evaluations = 0
        self.last: list[Tensor] = []  # the switching values of the last gradient that was taken on a side
        self.start = torch.cat([p.detach().reshape(-1) for p in self._parameters]).cpu().numpy().copy()
        if not np.isfinite(self.start).all():
            raise InputError("expected finite weights to start from")
        with preserve_state(self.model):  # also the random state, which dropout moves
            first = self.value(self.start)
            random = RandomState(device_of(self.model))
            again = self.value(self.start)
            drawn = (
                random.moved()
            )  # a loss that seeds the generators itself leaves them as they were after the first pass
        if not math.isfinite(first):
            raise InputError(f"expected a finite loss at the start; got {first}")
        if first != again:
            raise InputError(
                f"the loss is not a function of the weights: {first!r}, then {again!r} (dropout, or random data?)"
            )
        if drawn:
            raise InputError(
                "the loss draws random numbers (dropout, or random data?): expected a function of the weights"
            )

    def put(self, point: Array) -> nn.Module:
        """The model with these weights: the same object at every call."""
        vector = torch.from_numpy(np.ascontiguousarray(point))
        at = 0
        with torch.no_grad():
            for p in self._parameters:
                p.copy_(vector[at : at + p.numel()].view_as(p))
                at += p.numel()
        return self.model

    def by_parameter(self, vector: Array) -> dict[str, Tensor]:
        """The entries of a vector by parameter, in the parameters' shapes."""
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        chunks = torch.from_numpy(vector).split([p.numel() for p in self._parameters])
        return {name: chunk.view(p.shape) for name, chunk, p in zip(names, chunks, self._parameters, strict=True)}

    def switching(self, point: Array) -> list[Tensor]:
        """The switching values of all kinks (`excite.train.dynamics.kinks`); one forward pass."""
        kinks = Kinks()
        self.tensor(point, kinks)
        return [value.detach() for value in kinks.values]

    def gradients(self, point: Array, side: Side, places: Sequence[tuple[int, int]]) -> tuple[Array, Array, Array]:
        """On one side of all kinks: the switching values at `places` (k,), ∇R (P,) and their gradients (k, P)."""
        kinks = Kinks(side)
        loss = self.tensor(point, kinks)
        self.last = [output.detach() for output in kinks.values]
        values = [kinks.values[call].reshape(-1)[element] for call, element in places]
        self.evaluations += 1 + len(values)
        rows = [
            torch.cat([
                gradient.reshape(-1)
                for gradient in torch.autograd.grad(
                    output, self._parameters, retain_graph=True, allow_unused=True, materialize_grads=True
                )
            ]).detach().cpu().numpy()
            for output in (loss, *values)
        ]  # fmt: skip
        return (
            np.array([float(value.detach()) for value in values]),
            rows[0],
            np.array(rows[1:]).reshape(-1, len(point)),
        )

    def tensor(self, point: Array, kinks: Kinks | None = None) -> Tensor:
        """The loss, with its graph; `kinks` sees how it is computed."""
        self.put(point)
        try:
            with torch.enable_grad(), eagerly(self.model), kinks or nullcontext():
                value = self._loss(self.model)
        except ExciteError:
            raise
        except Exception as error:
            raise ModelError(
                f"the loss does not run on the model in float64 (give data as doubles): {first_line(error)}"
            ) from error
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise InputError(f"expected a loss that is one number with a gradient; got {shown(value)}")
        check_real(check_dense(value, "a loss"))
        return value.reshape(())

    def value(self, point: Array) -> float:
        """Returns the loss at a point."""
        return float(self.tensor(point).detach())

    def gradient(self, point: Array, side: Side | None = None) -> tuple[float, Array]:
        """Returns (R, ∇R).

        Where a ReLU has a kink it is the element of the subdifferential that autograd takes. With `side`, those of the smooth continuation
        of that side of all kinks.
        """
        self.evaluations += 1
        kinks = Kinks(side) if side else None
        value = self.tensor(point, kinks)
        self.last = [] if kinks is None else [value.detach() for value in kinks.values]
        gradients = torch.autograd.grad(value, self._parameters, allow_unused=True, materialize_grads=True)
        gradient = torch.cat([g.reshape(-1) for g in gradients]).detach().cpu().numpy().astype(np.float64)
        number = float(value.detach())
        if not (math.isfinite(number) and np.isfinite(gradient).all()):
            raise TrainingStopped(
                f"the loss or its gradient is no longer finite (loss {number}): shorten the time or step"
            )
        return number, gradient

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Trained parameters of the copy."""
        return self._parameters


class FlowRecorder:
    """Quantities at chosen moments."""

    def __init__(self, field: Field, quantities: Mapping[str, Quantity] | None):
        self._field, self._quantities = field, dict(quantities or {})
        for name in ("loss", "gradient"):
            if name in self._quantities:
                raise InputError(f"quantities: {name!r} is recorded in any case; give yours another name")
        self.times: list[float] = []
        self._values: dict[str, list[Any]] = {name: [] for name in ("loss", "gradient", *self._quantities)}

    def add(self, time: float, point: Array) -> None:
        """Records all quantities at a point."""
        value, gradient = self._field.gradient(point)
        self.times.append(time)
        self._values["loss"].append(value)
        self._values["gradient"].append(float(np.linalg.norm(gradient)))
        with torch.no_grad():
            for name, quantity in self._quantities.items():
                result = quantity(self._field.put(point))
                result = result.detach().cpu().numpy() if isinstance(result, Tensor) else result
                self._values[name].append(np.array(result, dtype=np.float64))

    def result(
        self,
        point: Array,
        status: Status,
        steps: int,
        squares: Array,
        slides: int = 0,
        crossings: int = 0,
        sliding: float = 0.0,
    ) -> FlowResult:
        """Builds the result from the records and the last point."""
        loss, gradient = self._field.gradient(point)
        values = {name: np.asarray(series) for name, series in self._values.items()}
        model = self._field.put(point)
        norm, count = float(np.linalg.norm(gradient)), self._field.evaluations
        return FlowResult(
            np.asarray(self.times), values, model, status, loss, norm, steps, count, float(squares.sum()), slides, crossings,
            sliding, self._field.by_parameter(squares),
        )  # fmt: skip


def positive(name: str, value: Any, *, zero: bool = False) -> float:
    """Checks a positive number; with `zero`, one that is not negative."""
    return check_number(value, name, 0, above=not zero)
