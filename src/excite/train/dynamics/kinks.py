"""Kinks of a loss: on which side of each one the weights are, and the smooth continuation of a side beyond it.

Between kinks the loss of a ReLU network is smooth. `Kinks` sees the calls that have kinks while the loss is computed. It
reads their switching values (the side is their sign, or an index), or computes each call as on a given side: then the loss
and its gradient are smooth also across the kink, and an integrator of high order can step over it and look back for the
moment at which it crossed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from excite.wiring.operators import OPERATORS

Side = list[Tensor]  # one a switching value: True where it is above 0, or an index
_ROUNDING = 16 * torch.finfo(torch.float64).eps


def _switching(name: str) -> Callable[..., list[Tensor]]:
    """The switching values of an activation: its input minus each of its kinks."""
    activation = OPERATORS[name].activation
    assert activation is not None

    def values(z: Tensor, *args: Any, **kwargs: Any) -> list[Tensor]:
        kinks = [kink for kink in activation.kinks(*args, **kwargs) if kink is not None]
        return [z if isinstance(kink, float) and kink == 0 else z - kink for kink in kinks]

    return values


def _in_range(side: Side, z: Tensor, low: Any = None, high: Any = None) -> Tensor:
    left = list(side)
    result = z if low is None else torch.where(left.pop(0), z, torch.as_tensor(low, dtype=z.dtype, device=z.device))
    return (
        result
        if high is None
        else torch.where(left.pop(0), torch.as_tensor(high, dtype=z.dtype, device=z.device), result)
    )


def _prelu(side: Side, z: Tensor, weight: Tensor) -> Tensor:
    slope = weight.view(-1, *[1] * (z.dim() - 2)) if weight.numel() > 1 else weight
    return torch.where(side[0], z, slope * z)


def _pool(axes: int) -> tuple[Callable[..., list[Tensor]], Callable[..., Tensor]]:
    pool = getattr(torch.nn.functional, f"max_pool{axes}d_with_indices")

    def places(z: Tensor, *args: Any, **kwargs: Any) -> list[Tensor]:
        return [pool(z.detach(), *args, **kwargs)[1]]

    def gather(side: Side, z: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        index = side[0]
        return z.flatten(-axes).gather(-1, index.flatten(-axes)).view(index.shape)

    return places, gather


# The linear function of each activation on a side, by name.
_ON_SIDE: dict[str, Callable[..., Tensor]] = {
    "relu": lambda side, z: torch.where(side[0], z, 0.0),
    "leaky_relu": lambda side, z, negative_slope=0.01: torch.where(side[0], z, negative_slope * z),
    "prelu": _prelu,
    "abs": lambda side, z: torch.where(side[0], z, -z),
    "threshold": lambda side, z, threshold, value: torch.where(side[0], z, torch.as_tensor(value, dtype=z.dtype)),
    "hardtanh": lambda side, z, min_val=-1.0, max_val=1.0: _in_range(side, z, min_val, max_val),
    "relu6": lambda side, z: _in_range(side, z, 0.0, 6.0),
    "clamp": lambda side, z, min=None, max=None: _in_range(side, z, min, max),
    "clamp_min": lambda side, z, min: _in_range(side, z, min),
    "clamp_max": lambda side, z, max: _in_range(side, z, None, max),
}
# By the name of the function: its switching values, and what it is on a side.
_CALLS: dict[str, tuple[Callable[..., list[Tensor]], Callable[..., Tensor]]] = {
    **{name: (_switching(name), on_side) for name, on_side in _ON_SIDE.items()},
    "maximum": (lambda a, b: [a - b], lambda side, a, b: torch.where(side[0], a, b)),
    "minimum": (lambda a, b: [b - a], lambda side, a, b: torch.where(side[0], a, b)),
    **{f"max_pool{axes}d": _pool(axes) for axes in (1, 2, 3)},
}
_FLAGGED = ("relu", "leaky_relu", "threshold", "hardtanh", "relu6")  # `inplace` may be their last argument
_INPLACE = {f"{name}_": name for name in ("relu", "leaky_relu", "abs", "threshold", "hardtanh", "clamp")}


class Kinks(TorchFunctionMode):
    """While it is on, `values` collects the switching values of all calls that depend on a parameter.

    They carry their graphs. With `side` (of an earlier pass) each call is computed as on that side. Calls with kinks that are
    not in the list (such as `where` with a condition on the weights) are left as they are.
    """

    def __init__(self, side: Side | None = None):
        super().__init__()
        self.values: list[Tensor] = []
        self._side = side

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        name = "threshold" if name == "_threshold" else name  # as torch.nn.functional calls it
        plain = _INPLACE.get(name, name)
        moving = any(isinstance(argument, Tensor) and argument.requires_grad for argument in args)
        if plain not in _CALLS or not moving or kwargs.get("return_indices"):
            return func(*args, **kwargs)
        inplace = bool(kwargs.pop("inplace", False)) or plain != name
        if plain in _FLAGGED and isinstance(args[-1], bool):
            inplace, args = inplace or args[-1], args[:-1]
        kwargs.pop("return_indices", None)
        kwargs = {("z" if key in ("input", "self") else key): value for key, value in kwargs.items()}
        if plain.startswith("max_pool") and len(args) > 6:
            args = args[:6]
        written = args[0]
        if inplace:  # what is read stays as it was before
            args = (written.clone(), *args[1:])
        read, on_side = _CALLS[plain]
        first = len(self.values)
        self.values += read(*args, **kwargs)
        if self._side is None:
            side = [sides(value.detach(), None) for value in self.values[first:]]
        else:
            side = self._side[first : len(self.values)]
        result = on_side(side, *args, **kwargs)
        return written.copy_(result) if inplace else result


def sides(value: Tensor, before: Tensor | None) -> Tensor:
    """On which side a switching value is; `before` where it is too close to 0 to decide."""
    if not value.is_floating_point():
        return value
    above = value > 0
    if before is None or not value.numel():
        return above
    return torch.where(value.abs() > _ROUNDING * value.abs().max(), above, before)


def left_side(values: Sequence[Tensor], side: Side, masks: Sequence[Tensor]) -> list[Tensor]:
    """Which switching values have left their side, but for those that are held on the kink."""
    return [(sides(value, positive) != positive) & ~excluded for value, positive, excluded in zip(values, side, masks)]


def first_crossing(low: Sequence[Tensor], high: Sequence[Tensor], gone: Sequence[Tensor]) -> float:
    """Where the first of the switching values that are `gone` leaves its side, as a fraction of the way.

    Each is taken as linear from `low` to `high`; ½ if this does not say, because an index changed.
    """
    nearest = 1.0
    for a, b, left in zip(low, high, gone):
        if not bool(left.any()):
            continue
        if not a.is_floating_point():
            return 0.5
        fractions = a[left] / (a[left] - b[left])
        nearest = min(nearest, float(fractions.nan_to_num(nan=0.5).clamp(0, 1).min()))
    return nearest
