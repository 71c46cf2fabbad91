"""Steadiness of a run while it is in progress: τ and φ such that no normalized update from step τ on exceeds φ.

Definition 1 of *What training reveals*. `excite.bounds.steadiness` is the same for the updates of a finished run.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from excite.probes.bias_trajectory.windows import wide

MAX_BLOCKS = 256  # blocks that are kept, an even number


class Steady:
    """φ, the largest update in the last half of the run so far, and τ, the first step from which none exceeded it.

    Steps count from 0, as in the paper: update t leads from step t to t + 1. Windows of steps come in with their largest
    update, and are kept in at most 256 blocks of neighbours, as many windows in each: one up to 256 windows, then 2, 4, ….
    A block counts as a whole. So up to 256 windows nothing is lost; beyond, φ is the largest update of an interval that may
    begin up to one block before the middle of the run, and τ comes late by less than a block. A block is at most 1/128 of
    the windows. Whatever is merged, no update seen from step τ on exceeded φ.

    `plain` is for a CPU: numbers. On other devices tensors, because nothing may wait for them: steps are known here,
    updates there.
    """

    def __init__(self, device: torch.device, *, plain: bool):
        self._device, self._plain = device, plain
        self._ends: list[int] = []  # the last step of each block
        self._width, self._inside = 1, 0  # windows in a block, and in the newest one so far
        self._peaks: list[float] = []  # plain: the largest update of each block, −inf if there was none
        self._table = self._empty()  # otherwise: ends and peaks, (2, 256)

    def add(self, step: int, largest: float | Tensor) -> dict[str, float | Tensor]:
        """The largest update of the window that ends with `step`, NaN if there was none; `phi` and `tau` with it."""
        if self._inside == self._width or not self._ends:
            if len(self._ends) == MAX_BLOCKS:
                self._merge()
            self._ends.append(step)
            self._inside = 0
            self._peaks.append(-math.inf)
        self._inside += 1
        self._ends[-1] = step
        half = bisect_right(self._ends, step / 2)  # the first block that reaches into the last half
        return self._in_numbers(float(largest), half) if self._plain else self._in_tensors(step, largest, half)

    def _in_numbers(self, largest: float, half: int) -> dict[str, float | Tensor]:
        peaks = self._peaks
        if largest > peaks[-1]:  # NaN is not
            peaks[-1] = largest
        phi = max(peaks[half:])
        if phi < 0:  # no update in the last half
            return {"phi": math.nan, "tau": math.nan}
        for i in range(half - 1, -1, -1):
            if peaks[i] > phi:
                return {"phi": phi, "tau": float(self._ends[i])}
        return {"phi": phi, "tau": 0.0}

    def _in_tensors(self, step: int, largest: float | Tensor, half: int) -> dict[str, float | Tensor]:
        last_block = len(self._ends) - 1
        ends, peaks = self._table
        ends[last_block].fill_(step)
        torch.fmax(peaks[last_block], torch.as_tensor(largest).to(peaks), out=peaks[last_block])  # NaN does not count
        phi = peaks[half : last_block + 1].amax()
        known = phi * 0  # NaN if there was no update in the last half
        return {"phi": phi + known, "tau": (ends * (peaks > phi)).amax() + known}

    def _empty(self) -> Tensor:
        table = torch.zeros(2, MAX_BLOCKS, dtype=wide(self._device), device=self._device)
        table[1].fill_(-math.inf)
        return table

    def _merge(self) -> None:
        """Two neighbours into one, all along."""
        self._ends, self._width = self._ends[1::2], 2 * self._width
        self._peaks = [max(pair) for pair in zip(self._peaks[::2], self._peaks[1::2])]
        if not self._plain:
            merged, self._table = self._table.view(2, -1, 2).amax(2), self._empty()
            self._table[:, : len(self._ends)] = merged

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, for a checkpoint."""
        recorded = self._table[1, : len(self._ends)].clone()
        peaks = torch.tensor(self._peaks, dtype=torch.float64) if self._plain else recorded
        return {"ends": list(self._ends), "peaks": peaks, "width": self._width, "inside": self._inside}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        self._ends, self._width, self._inside = list(state["ends"]), int(state["width"]), int(state["inside"])
        self._peaks, self._table = state["peaks"].tolist(), self._empty()
        self._table[0, : len(self._ends)] = torch.tensor(self._ends).to(self._table)
        self._table[1, : len(self._ends)] = state["peaks"].to(self._table)
