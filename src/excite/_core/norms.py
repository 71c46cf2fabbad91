"""The three norms, by name or by number, and their duals."""

from __future__ import annotations

import math
from typing import Literal

from excite.errors import InputError

Norm = Literal["inf", "2", "1"]
_NAMES: dict[object, Norm] = {
    "inf": "inf", "Inf": "inf", "linf": "inf", math.inf: "inf",
    "2": "2", "l2": "2", 2: "2",
    "1": "1", "l1": "1", 1: "1",
}  # fmt: skip
DUAL: dict[Norm, Norm] = {"inf": "1", "2": "2", "1": "inf"}


def parse_norm(norm: object, allowed: tuple[Norm, ...] = ("inf", "2", "1")) -> Norm:
    """ "inf", "2" or "1" from a name or a number; anything else is refused."""
    try:
        name = None if isinstance(norm, bool) else _NAMES.get(norm)
    except TypeError:
        name = None
    if name is None or name not in allowed:
        raise InputError(f"unknown norm {norm!r}: expected one of {', '.join(repr(a) for a in allowed)}")
    return name
