"""One row of the table of operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from torch import Tensor

Linearity = Literal["constant", "linear", "piecewise", "discrete", "smooth"]
Pattern = Callable[[SimpleNamespace, Any], Iterable[Tensor | None]]
Refusal = Callable[[SimpleNamespace], str | None]


@dataclass(frozen=True)
class Operator:
    """How an operator depends on its floating-point arguments; arguments are named as in its ATen schema.

    - "constant": not at all, as `zeros_like`.
    - "linear": it is affine in all of them together, as `add` and `cat`.
    - "piecewise": affine as long as `pattern(arguments, result)`, tensors of booleans or integers, stays the same. Arguments
      with the same pattern form a convex set.
    - "discrete": its result is constant on convex sets and is its own pattern, as `gt` and `floor`.
    - "smooth": none of these.

    Args:
        factors: groups of arguments that are multiplied with each other: at most one group may depend on the input.
        fixed: arguments that must not depend on it.
        unless: says for which arguments the row does not hold and why, as a phrase after the operator's name; else None.
    """

    name: str
    linearity: Linearity
    pattern: Pattern | None = None
    factors: tuple[tuple[str, ...], ...] = ()
    fixed: tuple[str, ...] = ()
    unless: Refusal | None = None
