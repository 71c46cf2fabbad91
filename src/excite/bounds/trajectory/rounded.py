"""Coefficients of dependent vectors in floating point, and how far off they can be.

For vectors whose exact coefficients have too many digits, such as activations of a hidden layer of some hundred units: there
they are ratios of determinants. A vector is missed by r = Σ a_k s_k − s, ‖r‖² = a'Ka − 2a'k + k(s, s), and what rounding can hide in
that sum is added to it, so that the bound on ‖r‖ holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import linalg

Array = npt.NDArray[Any]


def rounded(basis: Sequence[Array], new: Sequence[Array]) -> tuple[Array, Array]:
    """a (r, M) with Σ_k a_k s_k ≈ s for independent s_k, (r, n_l) a layer, and s, (M, n_l) a layer; bounds on ‖r‖ (M,)."""
    gram, right = _inner(basis, basis), _inner(basis, new)
    own = np.prod([layer.sum(1, dtype=np.float64) for layer in new], axis=0)
    solution = linalg.lstsq(gram, np.hstack([right, np.eye(len(gram))]))[0]
    a, inverse = solution[:, : right.shape[1]], solution[:, right.shape[1] :]
    a = a + inverse @ (right - gram @ a)
    square = (a * (gram @ a - 2 * right)).sum(0) + own
    hidden = (np.abs(a) * (gram @ np.abs(a) + 2 * right)).sum(0) + own
    hidden *= 4 * (len(gram) + len(basis) + 2) * np.finfo(np.float64).eps
    return a, np.sqrt(np.maximum(square, 0) + hidden)


def _inner(left: Sequence[Array], right: Sequence[Array]) -> Array:
    """Π_l ⟨s_l, s'_l⟩ (N, M)."""
    return np.asarray(np.prod([a.astype(np.float64) @ b.astype(np.float64).T for a, b in zip(left, right)], axis=0))
