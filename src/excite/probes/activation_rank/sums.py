"""Sums of outer products in float64, in place."""

from __future__ import annotations

import numpy as np
import torch
from scipy.linalg.blas import dsyrk
from torch import Tensor

from excite._core.lanczos import Array

# Float64 is not everywhere: there sums are made on the CPU.
_WITHOUT_DOUBLE = {"mps"}


def home(device: torch.device) -> torch.device:
    """Where sums over rows on `device` are kept."""
    return torch.device("cpu") if device.type in _WITHOUT_DOUBLE else device


def add_outer(total: Tensor, rows: Tensor) -> None:
    """total += rowsᵀ rows for total (D, D) and rows (R, D), both float64; only the lower triangle of total counts."""
    if total.device.type != "cpu":
        total.addmm_(rows.T, rows)
        return
    # What lies row by row here is column by column to BLAS, so that its upper triangle is our lower one.
    dsyrk(1.0, rows.contiguous().numpy().T, beta=1.0, c=total.numpy().T, overwrite_c=1)


def symmetric(total: Tensor) -> Array:
    """The whole matrix, on the CPU."""
    lower = np.tril(total.cpu().numpy())
    return lower + np.tril(lower, -1).T  # type: ignore[no-any-return]
