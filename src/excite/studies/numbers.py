"""The numbers of one piece of work: one arm, one seed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Numbers:
    """`values` by name, also as attributes: `found.gap`."""

    arm: str
    seed: int
    values: Mapping[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()  # what speaks against them; empty if they can be trusted
    by_chance: bool = False  # the network decides hardly better than by chance: nothing else says much then

    def __getattr__(self, name: str) -> float:
        values: Mapping[str, float] = self.__dict__.get("values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"no number {name!r}; there are {', '.join(values)}")

    def plain(self) -> dict[str, Any]:
        """Ready for JSON: what is not finite is None."""
        values = {name: value if math.isfinite(value) else None for name, value in self.values.items()}
        return {"arm": self.arm, "seed": self.seed, **values, "flags": self.flags}
