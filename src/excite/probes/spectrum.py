"""How many directions vectors use, read off the eigenvalues of their covariance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Between:
    """A number known to lie in [low, high]. `float()` gives the middle.

    Attributes:
        low: Lower end.
        high: Upper end; equal to `low` if the number is exact.

    Example:
        >>> from excite.probes import Between
        >>> float(Between(2.0, 3.0)), Between(2.0, 3.0).exact
        (2.5, False)
    """

    low: float
    high: float

    @property
    def exact(self) -> bool:
        """Whether both bounds are equal."""
        return self.low == self.high

    def over(self, width: float) -> Between:
        """Returns the bounds divided by a number."""
        return Between(self.low / width, self.high / width)

    def __float__(self) -> float:
        return (self.low + self.high) / 2

    def __format__(self, form: str) -> str:
        return f"{self.low:{form}}" if self.exact else f"{self.low:{form}}–{self.high:{form}}"


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of a covariance, as far as known: the i-th lies in [values[i], values[i] + slack].

    Every quantity is a `Between`, the range that the slack leaves. The most and the least even spectrum bound the effective rank
    and the participation ratio, which grow with evenness (they are Schur-concave).

    Attributes:
        values: (D,), largest first.
        slack: 0 if the matrix was summed exactly; the error bound of the sketch otherwise.
        total: Sum of the eigenvalues.
        tolerance: Eigenvalues up to tolerance · largest count as zero.

    Example:
        >>> spectrum = excite.probes.richness(model, x)["0"].covariance
        >>> spectrum.width, spectrum.rank.exact
        (4, True)
    """

    values: Array
    slack: float
    total: float
    tolerance: float

    @property
    def width(self) -> int:
        """Number of eigenvalues."""
        return len(self.values)

    def explained(self, k: int) -> Between:
        """The fraction of the variance in the first k principal components; 0 if there is no variance."""
        if self.total <= 0:
            return Between(0.0, 0.0)
        if k >= self.width:
            return Between(1.0, 1.0)
        first = float(self.values[:k].sum())
        return Between(first / self.total, min(1.0, (first + min(k * self.slack, self._remainder)) / self.total))

    @property
    def effective_rank(self) -> Between:
        """exp of the entropy of λ/Σλ (Roy and Vetterli): 1 to D; 0 if there is no variance."""
        return self._by(lambda p: float(np.exp(-(p * np.log(np.where(p > 0, p, 1.0))).sum())))

    @property
    def participation_ratio(self) -> Between:
        """(Σλ)² / Σλ²: 1 to D; 0 if there is no variance."""
        return self._by(lambda p: float(1 / (p**2).sum()))

    @property
    def rank(self) -> Between:
        """Eigenvalues above tolerance · largest."""
        if self.total <= 0:
            return Between(0.0, 0.0)
        low = self.values > self.tolerance * (self.values[0] + self.slack)
        high = self.values + min(self.slack, self._remainder) > self.tolerance * self.values[0]
        return Between(float(low.sum()), float(high.sum()))

    @property
    def largest(self) -> Between:
        """The largest eigenvalue."""
        return Between(float(self.values[0]), float(self.values[0]) + min(self.slack, self._remainder))

    @property
    def smallest(self) -> Between:
        """The last one is raised by at most what is left over all that are tied with it."""
        last = float(self.values[-1])
        ties = int((self.values <= last).sum())
        return Between(last, last + min(self.slack, self._remainder / ties))

    @property
    def _remainder(self) -> float:
        return max(0.0, self.total - float(self.values.sum())) if self.slack else 0.0

    def _by(self, measure: Callable[[Array], float]) -> Between:
        if self.total <= 0:
            return Between(0.0, 0.0)
        low = measure((values := self._least_even()) / values.sum())
        return Between(low, low if not self._remainder else measure((values := self._most_even()) / values.sum()))

    def _least_even(self) -> Array:
        """The remainder goes to the largest first."""
        raised = np.clip(self._remainder - self.slack * np.arange(self.width), 0.0, self.slack)
        return np.asarray(self.values + raised)

    def _most_even(self) -> Array:
        """The remainder raises the smallest first, to a common level, none by more than the slack."""
        if not self._remainder:
            return self.values
        low, high = 0.0, float(self.values[0]) + self.slack
        for _ in range(100):
            level = (low + high) / 2
            filled = np.clip(level, self.values, self.values + self.slack)
            low, high = (level, high) if filled.sum() < self.total else (low, level)
        return np.asarray(np.clip(high, self.values, self.values + self.slack))


def spectrum(
    eigenvalues: Array, width: int, size: float, tolerance: float, total: float | None = None, slack: float = 0.0
) -> Spectrum:
    """Makes a spectrum from computed eigenvalues, largest first; the others of `width` are zero.

    What is left of equal rows after subtracting their mean is rounding, not variance: nothing, beside the largest entry `size`.
    """
    values = np.zeros(width)
    values[: len(eigenvalues)] = eigenvalues[:width].clip(min=0.0)
    sum_of = float(eigenvalues.sum()) if total is None else total
    if sum_of <= width * (4 * np.finfo(np.float64).eps * size) ** 2:
        return Spectrum(np.zeros(width), 0.0, 0.0, tolerance)
    return Spectrum(values, slack, sum_of if slack else float(values.sum()), tolerance)
