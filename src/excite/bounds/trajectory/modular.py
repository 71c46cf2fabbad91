"""Linear dependence of vectors with integer inner products, decided in integers.

The vectors may be too long to write down (Kronecker products of activations); their inner products K are products of
small counts. K of independent vectors is positive definite, so that a vector s with inner products k depends on them
exactly when k(s, s) − k'K⁻¹k = 0. All of it is computed modulo primes of 26 bits with exact floating-point products. Not
zero modulo one prime is not zero. Zero modulo all of them is zero unless each divides one and the same determinant of r
inner products, which is less than (Π n_l)^r: at most r Σ log₂ n_l / 25 of the 1.9 million primes do. Primes are drawn at
random; for 1000 vectors of five layers of 32 units a prime is among them with probability 5e-4, all `PRIMES` with 3e-17.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd, isqrt, prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from excite.bounds.trajectory.rounded import rounded

Array = npt.NDArray[Any]
PRIMES = 5
MAX_PRIMES = 40  # rationals with more than about 350 bits above and below are not reconstructed
_BLOCK = 64


class TooLong(ArithmeticError):
    """A coefficient is a rational with too many digits."""


class Kernel(Protocol):
    """Inner products, in integers, of vectors that are given by one 0/1 matrix a layer, (N, n_l)."""

    def inner(self, left: Sequence[Array], right: Sequence[Array], p: int) -> Array:
        """Inner products modulo p, (N, M)."""

    def squares(self, rows: Sequence[Array], p: int) -> Array:
        """Inner products of the vectors with themselves modulo p, (N,)."""

    def alive(self, rows: Sequence[Array]) -> Array:
        """Which vectors are not zero, (N,)."""

    def round(self, basis: Sequence[Array], new: Sequence[Array]) -> tuple[Array, Array]:
        """Coefficients in floating point, and how far from each its combination is at most; raises `TooLong` if there are none."""


class Kronecker:
    """Kronecker products of the activations of all layers: Π_l ⟨s_l, s'_l⟩, of a fully connected network."""

    def inner(self, left: Sequence[Array], right: Sequence[Array], p: int) -> Array:
        """Inner products modulo p, (N, M)."""
        return inner(left, right, p)

    def squares(self, rows: Sequence[Array], p: int) -> Array:
        """Inner products of the vectors with themselves modulo p, (N,)."""
        own = np.ones(len(rows[0]), np.int64)
        for layer in rows:
            own = own * (layer.sum(1, dtype=np.int64) % p) % p
        return own

    def alive(self, rows: Sequence[Array]) -> Array:
        """Which vectors are not zero: those with an active unit in every layer."""
        return np.asarray(np.logical_and.reduce([layer.any(1) for layer in rows]))

    def round(self, basis: Sequence[Array], new: Sequence[Array]) -> tuple[Array, Array]:
        """Coefficients in floating point, and how far from each its combination is at most."""
        return rounded(basis, new)


@dataclass
class Grams:
    """Inner products of vectors given by one 0/1 matrix a layer, (N, n_l), and by a kernel: which depend on which, and how."""

    columns: Sequence[Array]
    kernel: Kernel = field(default_factory=Kronecker)
    _bases: dict[int, tuple[Array, Array]] = field(default_factory=dict)
    _primes: list[int] = field(default_factory=list)
    _draws: np.random.Generator = field(default_factory=lambda: np.random.default_rng(26))

    def basis(self, number: int) -> tuple[int, Array, Array]:
        """A prime, the columns that do not depend on those before them, and K⁻¹ of these modulo the prime."""
        while len(self._primes) <= number:
            p = _draw(self._draws)
            if p in self._bases:
                continue
            self._bases[p] = _invert(self.kernel.inner(self.columns, self.columns, p), p)
            known = [len(self._bases[q][0]) for q in self._primes]
            if known and len(self._bases[p][0]) < known[0]:
                continue  # modulo a prime vectors can only depend more
            if known and len(self._bases[p][0]) > known[0]:
                self._primes.clear()
            self._primes.append(p)
        p = self._primes[number]
        return (p, *self._bases[p])

    def depends(self, new: Sequence[Array]) -> Array:
        """Which of the vectors (M,) are combinations of the columns."""
        dependent = np.ones(len(new[0]), bool)
        for index in range(PRIMES):
            p, pivots, inverse = self.basis(index)
            left = np.flatnonzero(dependent)
            rows = [layer[left] for layer in new]
            k = self.kernel.inner([layer[pivots] for layer in self.columns], rows, p)  # (r, M)
            residual = (self.kernel.squares(rows, p) - (k * multiply(inverse, k, p) % p).sum(0)) % p
            dependent[left] = residual == 0
        return dependent

    def coefficients(self, new: Sequence[Array]) -> tuple[Array, Array, Array]:
        """The basis (r,), coefficients (r, M) of vectors that depend on it, and how far from each its combination is at most.

        Coefficients are exact, rounded once, and the distances 0, unless they have too many digits (see `rounded`).
        """
        count = PRIMES
        while True:
            residues, primes = [], []
            for index in range(count):
                p, pivots, inverse = self.basis(index)
                k = self.kernel.inner([layer[pivots] for layer in self.columns], new, p)
                residues.append(multiply(inverse, k, p).reshape(-1))
                primes.append(p)
            try:
                coefficients = rationals(residues, primes).reshape(len(pivots), len(new[0]))
                return pivots, coefficients, np.zeros(len(new[0]))
            except TooLong:
                if count >= MAX_PRIMES:
                    return pivots, *self.kernel.round([layer[pivots] for layer in self.columns], new)
                count *= 2


def inner(left: Sequence[Array], right: Sequence[Array], p: int) -> Array:
    """Π_l ⟨s_l, s'_l⟩ modulo p, (N, M)."""
    product: Array = np.ones((len(left[0]), len(right[0])), np.int64)
    for a, b in zip(left, right):
        counts = (a.astype(np.float64) @ b.astype(np.float64).T).astype(np.int64)
        product = product * (counts % p) % p
    return product


def multiply(a: Array, b: Array, p: int) -> Array:
    """a·b modulo p by two floating-point products: 13 bits times 26 bits, summed over at most 2¹⁴, fit 53 bits."""
    right = b.astype(np.float64)
    high, low = (np.rint(half.astype(np.float64) @ right).astype(np.int64) % p for half in (a >> 13, a & 8191))
    return np.asarray((high * 8192 + low) % p)


def _invert(gram: Array, p: int) -> tuple[Array, Array]:
    """The first independent columns of a Gram matrix, and the inverse of their part; a block of columns at a time."""
    pivots = np.zeros(0, np.int64)
    inverse = np.zeros((0, 0), np.int64)
    for start in range(0, len(gram), _BLOCK):
        block = np.arange(start, min(start + _BLOCK, len(gram)))
        side = multiply(inverse, gram[np.ix_(pivots, block)], p)  # (r, block)
        residual = (gram[np.ix_(block, block)] - multiply(gram[np.ix_(block, pivots)], side, p)) % p
        chosen, small = _eliminate(residual, p)
        side = side[:, chosen]
        corner = multiply(side, small, p)
        inverse = np.block([[(inverse + multiply(corner, side.T, p)) % p, -corner % p], [-corner.T % p, small]])
        pivots = np.concatenate([pivots, block[chosen]])
    return pivots, inverse


def _eliminate(remaining: Array, p: int) -> tuple[Array, Array]:
    """The same for one block, by Gauss and Jordan. A zero on the diagonal is a column that depends on those before."""
    n = len(remaining)
    left, right = remaining.copy(), np.eye(n, dtype=np.int64)
    chosen = []
    for j in range(n):
        if left[j, j] == 0:
            continue
        chosen.append(j)
        factor = pow(int(left[j, j]), -1, p)
        left[j], right[j] = left[j] * factor % p, right[j] * factor % p
        column = left[:, j].copy()
        column[j] = 0
        left = (left - column[:, None] * left[j]) % p
        right = (right - column[:, None] * right[j]) % p
    return np.array(chosen, np.int64), right[np.ix_(chosen, chosen)]


def rationals(residues: Sequence[Array], primes: Sequence[int]) -> Array:
    """Numbers (E,) from what they are modulo primes: the one rational that has few digits above and below."""
    key = residues[0] + (residues[1] << 26)
    _, first, back = np.unique(key, return_index=True, return_inverse=True)
    if any((residue[first][back] != residue).any() for residue in residues):
        first = back = np.arange(len(key))
    modulus = prod(primes)
    lifts = [modulus // p * pow(modulus // p, -1, p) for p in primes]
    values = np.empty(len(first))
    for i, numbers in enumerate(zip(*(residue[first].tolist() for residue in residues))):
        values[i] = _rational(sum(r * lift for r, lift in zip(numbers, lifts)) % modulus, modulus)
    return values[back]


def _rational(u: int, modulus: int) -> float:
    """n/d with n ≡ u d and n, d at most the root of the modulus, by Euclid; a third of all digits must stay unused."""
    limit = isqrt(modulus)
    above, below, d_above, d_below = modulus, u, 0, 1
    while below > limit:
        q = above // below
        above, below = below, above - q * below
        d_above, d_below = d_below, d_above - q * d_below
    n, d = (below, d_below) if d_below > 0 else (-below, -d_below)
    if not d or gcd(n, d) != 1 or (max(abs(n), 1) * d) ** 3 > modulus**2:
        raise TooLong("a coefficient is a rational with too many digits")
    return n / d


def _draw(draws: np.random.Generator) -> int:
    """A random prime between 2²⁵ and 2²⁶."""
    small = np.arange(3, 2**13, 2)
    while True:
        p = int(draws.integers(2**24, 2**25)) * 2 + 1
        if (p % small != 0).all():
            return p
