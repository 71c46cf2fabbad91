"""Bounds from a steady first-layer bias on the function at the training points: Definition 1 and Corollary 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from excite._core.checks import check_count, check_number, to_array
from excite._core.compatibility import renamed_keywords
from excite.bounds.bound import Assumption, Bound
from excite.errors import InputError

Numbers = Tensor | npt.NDArray[np.floating] | Sequence[float]
Floats = npt.NDArray[np.float64]
PAPER = "What training reveals"


def numbers(name: str, values: Numbers, length: int | None = None) -> Floats:
    """The array of one number per step, finite and not negative; a single number stands for every step."""
    array = to_array(name, values)
    if array.ndim == 0 and length is not None:
        array = np.full(length, array)
    if array.ndim != 1 or not len(array) or (length is not None and len(array) != length):
        raise InputError(f"{name}: expected {length or 'at least one'} numbers, one per step; got shape {array.shape}")
    if not np.isfinite(array).all() or (array < 0).any():
        raise InputError(f"{name}: expected finite numbers that are not negative")
    return array


@dataclass(frozen=True)
class Steadiness:
    """A run is (τ, φ)-steady if no normalized update from step τ on exceeds φ (Definition 1).

    Args:
        tau: τ of the chosen pair.
        phi: φ of the chosen pair.
        tails: ``tails[t]`` is the largest update from t on, so that every (t, tails[t]) is such a pair.

    Example:
        >>> from excite.bounds import steadiness
        >>> run = steadiness([5.0, 3.0, 1.0, 2.0])
        >>> run.tau, run.phi, run.tails.tolist()
        (2, 2.0, [5.0, 3.0, 2.0, 2.0])
    """

    tau: int
    phi: float
    tails: Floats

    def after(self, tau: int) -> float:
        """The smallest φ for this τ."""
        if not 0 <= tau < len(self.tails):
            raise InputError(f"expected a step from 0 to {len(self.tails) - 1}; got {tau}")
        return float(self.tails[tau])

    def since(self, phi: float) -> int | None:
        """The first τ for this φ; None if the run never becomes that steady."""
        fine = np.flatnonzero(self.tails <= phi)
        return int(fine[0]) if len(fine) else None

    def __str__(self) -> str:
        return f"({self.tau}, {self.phi:.6g})-steady: no normalized update above {self.phi:.6g} in {len(self.tails) - self.tau} steps"


@renamed_keywords(share="fraction")
def steadiness(updates: Numbers, fraction: float = 0.5) -> Steadiness:
    """The pair (τ, φ) for which a run is steady, from its normalized updates (Definition 1).

    φ is the largest update in the last part of the run, τ the first step from which it holds.

    Args:
        updates: Normalized updates, one per step (of a batch: the largest).
        fraction: Last part of the run that φ is taken over, as a fraction.

    Returns:
        The pair, and the largest update from every step on.

    Raises:
        InputError: If updates are negative or not finite, or ``fraction`` is not in (0, 1].

    Example:
        >>> from excite.bounds import steadiness
        >>> print(steadiness([5.0, 3.0, 1.0, 2.0]))
        (2, 2)-steady: no normalized update above 2 in 2 steps
    """
    values = numbers("updates", updates)
    fraction = check_number(fraction, "fraction", 0, 1, above=True)
    tails = np.maximum.accumulate(values[::-1])[::-1]
    phi = float(tails[min(len(values) - 1, int(len(values) * (1 - fraction)))])
    return Steadiness(int(np.flatnonzero(tails <= phi)[0]), phi, tails)


def steady_lipschitz(
    updates: Numbers,
    sigma: float,
    points: int,
    *,
    tau: int = 0,
    phi: float | None = None,
    gamma: float | None = None,
    confidence: float = 0.95,
    product: float | None = None,
    zero: int | None = None,
) -> Bound:
    """Local Lipschitz constant at the training points of a steady run: λ(x) ≤ β φ (Corollary 1).

    Let T be the steps considered, each with a point drawn from all N with equal probability, and φ fixed before T. Call a step
    bad if some training point would have made an update above φ. The probability to draw no such point in k bad steps is at
    most (1 − 1/N)ᵏ; so if no update in T exceeds φ, then with confidence 1 − δ at most N ln(1/δ) steps were bad, and at a
    step of T chosen at random the bound holds for all points with probability ``terms["share"]``.

    With ``gamma`` (Assumption 1 measured over T, all points drawn in T) chance is not needed: λ ≤ (1 + γ) β φ, and T is
    everything from τ on.

    Args:
        updates: Normalized updates of the first bias, one per step.
        sigma: β ≥ σ₁(W₁) throughout.
        points: Number N of training points.
        tau: First step considered.
        phi: φ. By default 1.1 times the largest update in the first half of the steps from τ on, with the second half as T; with
            ``gamma`` the largest update from τ on. A φ of your own must not be chosen by looking at T.
        gamma: γ of Assumption 1.
        confidence: 1 − δ.
        product: The product of the layers' norms, for comparison: ``terms["tighter"]`` is its ratio to the value.
        zero: Number of draws from τ on that are missing in ``updates`` because the loss has no gradient there (the trajectory
            probe and `excite.probes.trajectory` count them under that name). With any of them the bound says nothing about
            the points drawn; None if unknown.

    Returns:
        An upper bound on the largest local Lipschitz constant at the training points.

    Raises:
        InputError: If updates are negative or not finite, or a number is out of range.

    Example:
        >>> from excite.bounds import steady_lipschitz
        >>> bound = steady_lipschitz([2.0] * 100, sigma=1.5, points=5, zero=0)
        >>> round(bound.value, 6), round(bound.terms["share"], 2)
        (3.3, 0.7)
    """
    values = numbers("updates", updates)
    tau, points = check_count(tau, "tau: a step", 0, len(values) - 1), check_count(points, "points")
    sigma, confidence = check_number(sigma, "sigma", 0), check_number(confidence, "confidence", 0, 1, above=True)
    if confidence == 1:
        raise InputError("confidence: expected a number above 0 and below 1; got 1")
    after = values[tau:]
    steady = _with_confidence(after, phi, points, confidence) if gamma is None else _observed(after, phi, gamma, points)
    value = sigma * steady.phi if gamma is None else (1 + gamma) * sigma * steady.phi
    terms = {"phi": steady.phi, "sigma": sigma, "share": steady.fraction, "steps": steady.steps}
    if product is not None:
        terms |= {"product": product, "tighter": product / value if value else math.inf}
    name, quantity = f"Corollary 1, {PAPER}", "largest local Lipschitz constant at the training points"
    return Bound(name, quantity, value, "upper", terms, (*steady.assumptions, _gradients_everywhere(zero)))


@dataclass(frozen=True)
class _SteadySteps:
    phi: float
    fraction: float  # probability that φ bounds all points at a step drawn at random
    steps: int
    assumptions: tuple[Assumption, ...]


def _observed(after: Floats, phi: float | None, gamma: float, points: int) -> _SteadySteps:
    """Assumption 1 is measured: φ bounds every point that was drawn."""
    phi = float(after.max()) if phi is None else phi
    checks = (
        Assumption("no normalized update from τ on exceeds φ", bool(after.max() <= phi)),
        Assumption("Assumption 1: slopes at training points stay within a factor 1 + γ", None, f"γ = {gamma:.3g}"),
        Assumption("every training point is drawn at least once from τ on", None if len(after) >= points else False),
    )
    return _SteadySteps(phi, 1.0, len(after), checks)


def _with_confidence(after: Floats, phi: float | None, points: int, confidence: float) -> _SteadySteps:
    """Points are drawn at random: at most N ln(1/δ) steps of T are bad."""
    if phi is None:
        half = max(1, len(after) // 2)
        phi, after = 1.1 * float(after[:half].max()), after[half:]
    bad_steps = points * math.log(1 / (1 - confidence))
    fraction = max(0.0, 1 - bad_steps / len(after)) if len(after) else 0.0
    checks = (
        Assumption("no normalized update in T exceeds φ", bool(len(after)) and bool(after.max() <= phi)),
        Assumption("T is longer than N ln(1/δ)", fraction > 0, f"{len(after)} steps, {bad_steps:.0f} needed"),
        Assumption("points are drawn with replacement, φ is fixed before T", None),
    )
    return _SteadySteps(phi, fraction, len(after), checks)


def _gradients_everywhere(zero: int | None) -> Assumption:
    holds = None if zero is None else check_count(zero, "zero", 0) == 0
    detail = f"{zero} draws without one" if zero else ""
    return Assumption("the loss has a gradient at every point drawn from τ on", holds, detail)
