"""Checks as on a GPU, whose values arrive later than they are computed, on the CPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from excite._core.background import DeferredChecks


class Copied:
    """A copy from a device that arrives at once."""

    def __init__(self, numbers: Tensor):
        self._numbers = numbers

    def ready(self) -> bool:
        return True

    def read(self) -> list[Any]:
        return self._numbers.tolist()  # type: ignore[no-any-return]


def deferring() -> DeferredChecks:
    return DeferredChecks("loss", defers=lambda tensor: True, copy=Copied)  # type: ignore[arg-type]
