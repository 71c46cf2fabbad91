"""What a steady first-layer bias says about the function at the training points: Definition 1 and Corollary 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from excite._core.checks import check_count, check_number, to_array
from excite.bounds.bound import Assumption, Bound
from excite.errors import InputError

Numbers = Tensor | npt.NDArray[np.floating] | Sequence[float]
Floats = npt.NDArray[np.float64]
PAPER = "What training reveals"


def numbers(name: str, values: Numbers, length: int | None = None) -> Floats:
    """One number a step, finite and not negative; a single number stands for every step."""
    found = to_array(name, values)
    if found.ndim == 0 and length is not None:
        found = np.full(length, found)
    if found.ndim != 1 or not len(found) or (length is not None and len(found) != length):
        raise InputError(f"{name}: expected {length or 'at least one'} numbers, one a step; got shape {found.shape}")
    if not np.isfinite(found).all() or (found < 0).any():
        raise InputError(f"{name}: expected finite numbers that are not negative")
    return found


@dataclass(frozen=True)
class Steadiness:
    """A run is (τ, φ)-steady if no normalized update from step τ on exceeds φ (Definition 1).

    `tails[t]` is the largest update from t on, so every pair (t, tails[t]) is one; `tau` and `phi` are the chosen pair.
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


def steadiness(updates: Numbers, share: float = 0.5) -> Steadiness:
    """The pair (τ, φ) of a run, from its normalized updates, one a step (of a batch: the largest).

    φ is the largest update in the last `share` of the run, τ the first step from which it holds.
    """
    found = numbers("updates", updates)
    share = check_number(share, "share", 0, 1, above=True)
    tails = np.maximum.accumulate(found[::-1])[::-1]
    phi = float(tails[min(len(found) - 1, int(len(found) * (1 - share)))])
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
    """Corollary 1: λ(x) ≤ β φ at every one of N = `points` training points, with β = `sigma` ≥ σ₁(W₁) throughout.

    Let T be the steps looked at, each with a point drawn anew from all N with the same chances, and φ fixed before T. Call a
    step bad if some training point would have made an update above φ. The chance to draw no such point in k bad steps is at
    most (1 − 1/N)ᵏ; so if no update in T exceeds φ, then with `confidence` 1 − δ at most N ln(1/δ) steps were bad, and
    at a step of T chosen at random the bound holds for all points with probability `terms["share"]`.

    φ is by default 1.1 times the largest update in the first half of the steps from τ on, and T the second half. A φ of
    your own must not be chosen by looking at T. With `gamma` (Assumption 1 measured over T, all points seen in T) chance
    is not needed: λ ≤ (1 + γ) β φ, T is everything from τ on and φ by default the largest update there. `product` is the
    product of norms, to stand beside it.

    A point at which the loss has no gradient makes no normalized update, however steep the function is there. `zero` says how
    many such draws from τ on are missing in `updates` (the trajectory probe and `excite.probes.trajectory` count them under
    that name): with any of them the bound says nothing about the points drawn.
    """
    found = numbers("updates", updates)
    tau, points = check_count(tau, "tau: a step", 0, len(found) - 1), check_count(points, "points")
    sigma, confidence = check_number(sigma, "sigma", 0), check_number(confidence, "confidence", 0, 1, above=True)
    if confidence == 1:
        raise InputError("confidence: expected a number above 0 and below 1; got 1")
    after = found[tau:]
    if gamma is not None:
        phi = float(after.max()) if phi is None else phi
        value = (1 + gamma) * sigma * phi
        assumptions: tuple[Assumption, ...] = (
            Assumption("no normalized update from τ on exceeds φ", bool(after.max() <= phi)),
            Assumption("Assumption 1: slopes at training points stay within a factor 1 + γ", None, f"γ = {gamma:.3g}"),
            Assumption(
                "every training point is drawn at least once from τ on", None if len(after) >= points else False
            ),
        )
        share = 1.0
    else:
        if phi is None:
            half = max(1, len(after) // 2)
            phi, after = 1.1 * float(after[:half].max()), after[half:]
        most = points * math.log(1 / (1 - confidence))
        share = max(0.0, 1 - most / len(after)) if len(after) else 0.0
        value = sigma * phi
        detail = f"{len(after)} steps, {most:.0f} needed"
        assumptions = (
            Assumption("no normalized update in T exceeds φ", bool(len(after)) and bool(after.max() <= phi)),
            Assumption("T is longer than N ln(1/δ)", share > 0, detail),
            Assumption("points are drawn with replacement, φ is fixed before T", None),
        )
    if zero is not None:
        zero = check_count(zero, "zero", 0)
    assumptions += (
        Assumption(
            "the loss has a gradient at every point drawn from τ on",
            None if zero is None else zero == 0,
            f"{zero} draws without one" if zero else "",
        ),
    )
    terms = {"phi": phi, "sigma": sigma, "share": share, "steps": len(after)}
    if product is not None:
        terms |= {"product": product, "tighter": product / value if value else math.inf}
    return Bound(
        f"Corollary 1, {PAPER}",
        "largest local Lipschitz constant at the training points",
        value,
        "upper",
        terms,
        assumptions,
    )
