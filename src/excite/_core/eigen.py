"""Eigenvectors of symmetric matrices, also of those on which LAPACK's divide and conquer does not converge."""

from __future__ import annotations

import torch
from torch import Tensor


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, rising, and eigenvectors of finite symmetric matrices (..., n, n), as `torch.linalg.eigh`.

    With several threads MKL fails on some Gram matrices in float32 whose entries reach far below rounding (an orthonormal basis of
    which some vectors lead nowhere). Such matrices are solved in float64 without these entries; all others as PyTorch does, bit for bit.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        peak = matrix.abs().amax((-2, -1), keepdim=True)
        above = matrix.abs() > peak * (torch.finfo(matrix.dtype).eps / matrix.shape[-1])
        values, vectors = torch.linalg.eigh(torch.where(above, matrix, 0).double())
    return values.to(matrix.dtype), vectors.to(matrix.dtype)
