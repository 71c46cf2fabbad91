"""What a theorem says about a network: a number, the terms it is made of, and whether each assumption held."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Assumption:
    """One condition of a theorem. `held` is None where it cannot be checked from what was given."""

    text: str
    held: bool | None
    detail: str = ""  # the numbers behind it

    def __post_init__(self) -> None:
        if self.held is not None:  # a comparison of numpy numbers gives numpy's own True, which `is True` does not know
            object.__setattr__(self, "held", bool(self.held))

    def __str__(self) -> str:
        word = {True: "held", False: "failed", None: "not checked"}[self.held]
        return f"{word}: {self.text}" + (f" ({self.detail})" if self.detail else "")


class Statement:
    """What a theorem says under assumptions."""

    name: str
    assumptions: tuple[Assumption, ...]

    @property
    def failed(self) -> tuple[Assumption, ...]:
        return tuple(a for a in self.assumptions if a.held is False)

    @property
    def holds(self) -> bool:
        """All assumptions were checked and held."""
        return all(a.held is True for a in self.assumptions)

    def told(self, said: str) -> str:
        return "\n".join([f"{self.name}: {said}", *(f"  {a}" for a in self.assumptions)])


@dataclass(frozen=True)
class Bound(Statement):
    """`value` bounds `quantity` from one side if every assumption held; it is None as soon as one failed.

    A value of infinity (or of 0 for a lower bound of something that is never negative) is a bound that says nothing.
    `terms` are the numbers that the value is made of, and stay where the value does not.
    """

    name: str  # theorem and paper
    quantity: str  # what is bounded, in words
    value: float | None
    side: Literal["upper", "lower"] = "upper"
    terms: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[Assumption, ...] = ()

    def __post_init__(self) -> None:
        if self.value is not None and (math.isnan(self.value) or self.failed):
            object.__setattr__(self, "value", None)

    def __str__(self) -> str:
        sign = "≤" if self.side == "upper" else "≥"
        known = self.value is not None
        return self.told(f"{self.quantity} {sign} {self.value:.6g}" if known else f"{self.quantity}: no bound")
