"""Evidence that the search worked: an attack that fails is not a margin."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

AGREE = 1.1  # two searches agree if the larger radius is within 10 % of the smaller
MISLED = 10.0  # a gradient that puts the boundary this many times too far away
BEATEN = 0.99
DOUBT = 0.05  # a model is not trusted if more than this share of its points is in doubt for one reason


@dataclass(frozen=True)
class Evidence:
    """Counts over the `attacked` points, those that are not misclassified from the start.

    flat: the gradient at the point is zero, or so small that the boundary is more than 10 times nearer than it says.
    lost: the gradient search broke nothing, but moving towards another data point, within the bounds, does.
    unbroken: nothing broke the point (censored).
    checked, beaten: points given to the gradient-free search, and those where it found a smaller perturbation.
    agreement: share of points where the best two independent searches end within 10 % of each other.
    """

    attacked: int
    flat: int
    lost: int
    unbroken: int
    checked: int
    beaten: int
    agreement: float | None

    def flags(self) -> tuple[str, ...]:
        """Why the margins should not be trusted, a sentence each; empty if nothing speaks against them."""
        found = []
        most = DOUBT * self.attacked
        if self.flat > most:
            found.append(
                f"at {self.flat} of {self.attacked} points the gradient vanishes or puts the boundary more than "
                f"{MISLED:g} times too far away"
            )
        if self.lost > most:
            found.append(
                f"at {self.lost} of {self.attacked} points the gradient search broke nothing, but moving towards "
                "another data point does"
            )
        if self.unbroken > most:
            found.append(f"{self.unbroken} of {self.attacked} points were never broken")
        if self.beaten > DOUBT * self.checked:
            found.append(f"a search without gradients found smaller perturbations at {self.beaten} of {self.checked} points")
        if self.agreement is not None and self.agreement < 0.5:
            found.append(f"independent searches agree within 10 % at only {self.agreement:.0%} of the points")
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
