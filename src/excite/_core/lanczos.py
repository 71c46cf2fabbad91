"""Lanczos with full reorthogonalization: the largest eigenvalue of a positive semidefinite operator.

A Ritz value is below the largest eigenvalue because the basis is orthonormal. Once the Krylov space is exhausted (an
identity: after one vector) what remains of the next product is rounding, which may lie within the space; made a unit
vector it would be a copy of the ones before, and the Ritz values too large. The last of two Gram–Schmidt passes tells:
of a vector with a part outside the space it leaves nearly all, of rounding inside the space it leaves nearly nothing. The
basis ends there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from scipy.linalg import lapack
from torch import Tensor
from torch.nn.functional import normalize

Array = npt.NDArray[np.float64]

FAILURE = 1e-9  # probability that the upper bound is wrong
_CHECKED = {3, 6, 9, 12, 16, 20, 25, 31, 38, 46, 56, 68, 82, 96}  # after so many products
_GRID = 1 + np.geomspace(1e-12, 1e8, 61)
_INDEPENDENT = 0.5  # what the last pass leaves of a vector that is more than rounding, at least


def krylov_space(product: Callable[[Tensor], Tensor], start: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Orthonormal rows V (count, n) that span start, A start, A² start, …, and their images V A, by `count` products.

    Nothing is read back from the device. Rows after the Krylov space is exhausted are zero, as are their images, and
    V A V' has the eigenvalue 0 for them; where rounding leaves a direction orthogonal to the rows before, it may become a row.

    Args:
        product: x ↦ A x for a positive semidefinite A, (n,) -> (n,).
        start: (n,), of any length; zero makes all rows zero.
        count: of rows, at most n.
    """
    v, tiny = start, torch.finfo(start.dtype).tiny
    space, images = v.new_zeros(count, len(v)), v.new_zeros(count, len(v))
    for k in range(count):
        before = space[:k]
        for _ in range(2):
            v = normalize(v, dim=0, eps=tiny)
            v = torch.addmv(v, before.T, before @ v, alpha=-1)
        length = torch.linalg.vector_norm(v)
        space[k] = v * (length >= _INDEPENDENT) / length.clamp_min(_INDEPENDENT)  # NaN stays
        v = images[k] = product(space[k])
    return space, images


def largest(
    apply: Callable[[Array], Array],
    width: int,
    enough: Callable[[float, float], bool],
    *,
    max_products: int = 96,
    seed: int = 0,
) -> tuple[float, float]:
    """(low, high) around the largest eigenvalue λ of a positive semidefinite operator on vectors (width,).

    Stops as soon as `enough(low, high)`, at the latest after `max_products` products. Low is a Ritz value, so never above λ. High
    is wrong with probability at most FAILURE over the random start b (van Dorsselaer, Hochstenbach and van der Vorst,
    Computing probabilistic bounds for extreme eigenvalues of symmetric matrices with the Lanczos method, 2000): with u
    the unit eigenvector of λ and q_j = p_j(A) b the Lanczos vectors, which are orthonormal,
        1 ≥ Σ_j ⟨u, q_j⟩² = ⟨u, b⟩² Σ_j p_j(λ)²,
    and |⟨u, b⟩| < t has probability at most t √(2 width / π). The sum grows beyond the largest Ritz value, so λ lies
    below the x where it reaches 1/t².
    """
    max_products = min(max_products, width)
    t = FAILURE / math.sqrt(2 * width / math.pi)
    start = np.random.default_rng(seed).standard_normal(width)
    q = np.empty((max_products + 1, width))
    q[0] = start / np.linalg.norm(start)
    alpha, beta = np.empty(max_products), np.empty(max_products)
    low, high = 0.0, math.inf
    for j in range(max_products):
        w = apply(q[j])
        alpha[j] = q[j] @ w
        w -= alpha[j] * q[j] + (beta[j - 1] * q[j - 1] if j else 0.0)  # in exact arithmetic orthogonal to all of them
        before = math.sqrt(w @ w)
        w -= (q[: j + 1] @ w) @ q[: j + 1]
        beta[j] = math.sqrt(w @ w)
        ended = beta[j] <= max(_INDEPENDENT * before, 1e-14 * abs(alpha[0]))
        if ended or j + 1 == max_products or j + 1 in _CHECKED:
            low = float(lapack.dsterf(alpha[: j + 1], beta[:j])[0][-1]) if j else float(alpha[0])
            high = low if ended else _above(low, alpha[: j + 1], beta[: j + 1], t)
            if ended or enough(low, high):
                break
        q[j + 1] = w / beta[j]
    return low, high


def _above(ritz: float, alpha: Array, beta: Array, t: float) -> float:
    """The first x on a grid above the Ritz value with Σ_j p_j(x)² ≥ 1/t².

    The three-term recurrence is β_j p_{j+1} = (x − α_j) p_j − β_{j−1} p_{j−1}, p_0 = 1.
    """
    x = ritz * _GRID
    previous, current = np.zeros_like(x), np.ones_like(x)
    total = np.ones_like(x)
    last = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for a, b in zip(alpha, beta):
            previous, current = current, ((x - a) * current - last * previous) / b
            last = b
            total += current * current
    reached = ~(total < 1 / t**2)  # also where it overflowed
    return float(x[reached.argmax()]) if reached.any() else math.inf
