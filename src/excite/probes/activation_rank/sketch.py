"""Frequent Directions: a few rows whose second-moment matrix stays close to that of all rows added."""

from __future__ import annotations

import torch
from torch import Tensor


class FrequentDirections:
    """Rows B (at most `size`, D) with 0 ⪯ AᵀA − BᵀB ⪯ slack · 1, where A holds all rows added so far.

    Whenever 2 · size rows have come together, the squares of their singular values are lowered by that of number
    size + 1, which leaves at most `size` rows; `slack` is the sum of what was subtracted. It is at most
    ‖A − A_k‖²_F / (size + 1 − k) for every k ≤ size, A_k being the best approximation of rank k (Ghashami, Liberty,
    Phillips and Woodruff, 2016). Kept in float64; memory for 2 · size rows.
    """

    def __init__(self, width: int, size: int, device: torch.device | None = None):
        self.size, self.slack, self.total = size, 0.0, 0.0
        self._rows = torch.zeros(2 * size, width, dtype=torch.float64, device=device)
        self._used = 0

    @property
    def rows(self) -> Tensor:
        """(≤ 2 · size, D)."""
        return self._rows[: self._used]

    def add(self, rows: Tensor) -> None:
        """Adds rows (R, D) to the sketch."""
        self.total += float(rows.square().sum())  # ‖A‖²_F
        while len(rows):
            chunk = rows[: len(self._rows) - self._used]
            self._rows[self._used : self._used + len(chunk)] = chunk
            self._used += len(chunk)
            rows = rows[len(chunk) :]
            if self._used == len(self._rows):
                self._shrink()

    def _shrink(self) -> None:
        # The singular vectors on the right from those on the left: a small eigenproblem, 2 · size wide.
        squares, vectors = torch.linalg.eigh(self._rows @ self._rows.T)
        cut = squares[self.size - 1].clamp(min=0)  # rising order: number size + 1 from the top
        squares, vectors = squares[self.size :], vectors[:, self.size :]
        nonzero = squares > squares[-1] * 1e-14
        scale = torch.where(nonzero, ((squares - cut).clamp(min=0) / squares.clamp(min=1e-300)).sqrt(), 0.0)
        self._rows[: self.size] = scale[:, None] * (vectors.T @ self._rows)
        self._used = self.size
        self.slack += float(cut)
