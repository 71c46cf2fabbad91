"""The order in which points are seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from excite._core.randomness import stream


class Shuffle:
    """Batches of indices, in a new order each epoch, from a generator of its own.

    A checkpoint keeps the state of the generator at the start of the epoch: with it the order is drawn again, and the
    batches already done are skipped.
    """

    def __init__(self, points: int, batch: int, seed: int) -> None:
        self._points, self._batch = points, batch
        self._generator = torch.Generator().manual_seed(stream(seed, 2))
        self._start = self._generator.get_state()

    def epoch(self, device: torch.device) -> list[Tensor]:
        """The batches of the next epoch, on `device`; the last one may be smaller."""
        return list(self.order().to(device).split(self._batch))

    def order(self) -> Tensor:
        """The points of the next epoch, in their order."""
        self._start = self._generator.get_state()
        return torch.randperm(self._points, generator=self._generator)

    def state_dict(self, *, between: bool) -> dict[str, Any]:
        """`between` epochs the next order is not drawn yet; else the current one has to be drawn again."""
        return {"generator": self._generator.get_state() if between else self._start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state of the generator."""
        self._generator.set_state(state["generator"])
