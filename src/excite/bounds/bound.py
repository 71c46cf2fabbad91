"""The statement of a theorem about a network: a number, the terms it is made of, and whether each assumption held."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Assumption:
    """One condition of a theorem, and whether it held.

    Args:
        text: The condition.
        held: True or False; None where the arguments do not decide it.
        detail: The numbers behind the answer.

    Example:
        >>> from excite.bounds import Assumption
        >>> print(Assumption("the output is scalar", True, "1 output"))
        held: the output is scalar (1 output)
    """

    text: str
    held: bool | None
    detail: str = ""  # the numbers behind it

    def __post_init__(self) -> None:
        if self.held is not None:  # a comparison of numpy numbers gives numpy's own True, which `is True` does not know
            object.__setattr__(self, "held", bool(self.held))

    def __str__(self) -> str:
        verdict = {True: "held", False: "failed", None: "not checked"}[self.held]
        return f"{verdict}: {self.text}" + (f" ({self.detail})" if self.detail else "")


class Statement:
    """Base class of results of a theorem: a name and its assumptions."""

    name: str
    assumptions: tuple[Assumption, ...]

    @property
    def failed(self) -> tuple[Assumption, ...]:
        """The assumptions that were checked and did not hold."""
        return tuple(a for a in self.assumptions if a.held is False)

    @property
    def holds(self) -> bool:
        """Whether all assumptions were checked and held."""
        return all(a.held is True for a in self.assumptions)

    def describe(self, text: str) -> str:
        """`text` behind the name, and one line per assumption."""
        return "\n".join([f"{self.name}: {text}", *(f"  {a}" for a in self.assumptions)])


@dataclass(frozen=True)
class Bound(Statement):
    """A one-sided bound on a quantity, with the terms it is made of and its assumptions.

    ``value`` is None as soon as one assumption failed. An upper bound of infinity, or a lower bound of 0 on something that
    is never negative, says nothing. ``terms`` stay where the value does not.

    Args:
        name: Theorem and paper.
        quantity: What is bounded, in words.
        value: The bound.
        side: "upper" or "lower".
        terms: The numbers that the value is made of, by name.
        assumptions: The conditions of the theorem.

    Example:
        >>> from excite.bounds import Assumption, Bound
        >>> bound = Bound("Theorem 0", "norm", 2.5, assumptions=(Assumption("the norm is finite", True),))
        >>> bound.value, bound.holds
        (2.5, True)
        >>> print(bound)
        Theorem 0: norm ≤ 2.5
          held: the norm is finite
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
        return self.describe(f"{self.quantity} {sign} {self.value:.6g}" if known else f"{self.quantity}: no bound")
