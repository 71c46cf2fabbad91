"""The largest eigenvalue of a symmetric operator from below and from above, by Lanczos from a random start."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.linalg import lapack

Array = npt.NDArray[np.float64]

FAILURE = 1e-9  # probability that the upper bound is wrong
_LOOK = {3, 6, 9, 12, 16, 20, 25, 31, 38, 46, 56, 68, 82, 96}  # after so many products
_GRID = 1 + np.geomspace(1e-12, 1e8, 61)


def largest(
    apply: Callable[[Array], Array],
    width: int,
    enough: Callable[[float, float], bool],
    *,
    most: int = 96,
    seed: int = 0,
) -> tuple[float, float]:
    """(low, high) around the largest eigenvalue λ of a positive semidefinite operator on vectors (width,).

    Stops as soon as `enough(low, high)`, at the latest after `most` products. Low is a Ritz value, so never above λ. High
    is wrong with probability at most FAILURE over the random start b (van Dorsselaer, Hochstenbach and van der Vorst,
    Computing probabilistic bounds for extreme eigenvalues of symmetric matrices with the Lanczos method, 2000): with u
    the unit eigenvector of λ and q_j = p_j(A) b the Lanczos vectors, which are orthonormal,
        1 ≥ Σ_j ⟨u, q_j⟩² = ⟨u, b⟩² Σ_j p_j(λ)²,
    and |⟨u, b⟩| < t has probability at most t √(2 width / π). The sum grows beyond the largest Ritz value, so λ lies
    below the x where it reaches 1/t².
    """
    most = min(most, width)
    t = FAILURE / math.sqrt(2 * width / math.pi)
    start = np.random.default_rng(seed).standard_normal(width)
    q = np.empty((most + 1, width))
    q[0] = start / np.linalg.norm(start)
    alpha, beta = np.empty(most), np.empty(most)
    low, high = 0.0, math.inf
    for j in range(most):
        w = apply(q[j])
        alpha[j] = q[j] @ w
        w -= alpha[j] * q[j] + (beta[j - 1] * q[j - 1] if j else 0.0)
        w -= (q[: j + 1] @ w) @ q[: j + 1]  # full reorthogonalization: against what rounding left
        beta[j] = math.sqrt(w @ w)
        ended = beta[j] <= 1e-14 * abs(alpha[0])
        if ended or j + 1 == most or j + 1 in _LOOK:
            low = float(lapack.dsterf(alpha[: j + 1], beta[:j])[0][-1]) if j else float(alpha[0])
            high = low if ended else _above(low, alpha[: j + 1], beta[: j + 1], t)
            if ended or enough(low, high):
                break
        q[j + 1] = w / beta[j]
    return low, high


def _above(ritz: float, alpha: Array, beta: Array, t: float) -> float:
    """The first x on a grid above the Ritz value with Σ_j p_j(x)² ≥ 1/t², for the three-term recurrence
    β_j p_{j+1} = (x − α_j) p_j − β_{j−1} p_{j−1}, p_0 = 1."""
    x = ritz * _GRID
    before, now = np.zeros_like(x), np.ones_like(x)
    total = np.ones_like(x)
    last = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for a, b in zip(alpha, beta):
            before, now = now, ((x - a) * now - last * before) / b
            last = b
            total += now * now
    reached = ~(total < 1 / t**2)  # also where it overflowed
    return float(x[reached.argmax()]) if reached.any() else math.inf
