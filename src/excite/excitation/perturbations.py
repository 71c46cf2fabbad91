"""How a perturbation enters a signal: added to it, or multiplied into it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from excite.errors import InputError
from excite.excitation.auto_radius import Auto
from excite.excitation.radius import Radius, Relative, Stages


class Kind(Protocol):
    name: str

    def moved(self, signal: Tensor, perturbation: Tensor) -> Tensor:
        """The signal under the perturbation."""

    def between(self, signal: Tensor, moved: Tensor) -> Tensor:
        """The perturbation that leads from the signal to `moved`."""

    def slope(self, signal: Tensor, gradient: Tensor) -> Tensor:
        """From the gradient with respect to the signal to that with respect to the perturbation, at zero.

        Applied to the latter, it has the sign in which a step up the gradient moves the signal.
        """


class Additive:
    """h becomes h + d (equation 15)."""

    name = "additive"

    def moved(self, signal: Tensor, perturbation: Tensor) -> Tensor:
        return signal + perturbation

    def between(self, signal: Tensor, moved: Tensor) -> Tensor:
        return moved - signal

    def slope(self, signal: Tensor, gradient: Tensor) -> Tensor:
        return gradient


class Multiplicative:
    """h becomes h·(1 + d), entry by entry (section 7.2): an excitation that grows with the signals it perturbs."""

    name = "multiplicative"

    def moved(self, signal: Tensor, perturbation: Tensor) -> Tensor:
        return signal * (1 + perturbation)

    def between(self, signal: Tensor, moved: Tensor) -> Tensor:
        # Where the signal is 0 no factor changes it.
        return torch.where(signal == 0, 0, moved / torch.where(signal == 0, 1, signal) - 1)

    def slope(self, signal: Tensor, gradient: Tensor) -> Tensor:
        return gradient * signal


KINDS: dict[str, Kind] = {kind.name: kind for kind in (Additive(), Multiplicative())}


def check_kind(kind: object, radius: Radius) -> Kind:
    """The kind by its name; multiplicative sets take radii below 1, and none relative to the signal."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(f"kind: expected {' or '.join(map(repr, KINDS))}; got {kind!r}")
    if kind == "multiplicative":
        full = radius.radius if isinstance(radius, Stages) else radius
        if isinstance(full, Relative | Auto):
            raise InputError(
                "multiplicative perturbations are relative to the signal already: give a number or a dict instead of "
                f"{'Relative' if isinstance(full, Relative) else repr('auto')}"
            )
        largest = max(full.values()) if not isinstance(full, int | float) else full
        if largest >= 1:
            raise InputError(
                f"multiplicative radius {largest:g}: expected less than 1; from 1 on, h·(1 + d) lets a signal vanish or flip"
            )
    return KINDS[kind]
