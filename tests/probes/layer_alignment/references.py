"""Singular values by numpy."""

from __future__ import annotations

import numpy as np
from torch import Tensor


def svd(matrix: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    u, s, v = np.linalg.svd(matrix.detach().double().numpy(), full_matrices=False)
    return u, s, v
