"""How the first layer's bias moves: length, variance, distance to initialization (Theorem 1, Corollaries 2 and 3).

All are about plain SGD at batch size one, bᵗ⁺¹ − bᵗ = α_t ∂ℓ/∂b, with a bias that is not shared between positions. Then
‖bᵗ⁺¹ − bᵗ‖ = α_t ε_t r_t, with ε_t the loss derivative and r_t the normalized update of the sample drawn at t, and
λ_t/σ₁ ≤ r_t ≤ λ_t/σ_min(active rows). As printed, the paper has σ_n(W₁) there, which is too large once the first layer is
wider than its input.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from excite._core.checks import check_maybe
from excite.bounds.bound import Assumption, Bound
from excite.bounds.trajectory.steady import PAPER, Floats, Numbers, numbers
from excite.errors import InputError


def _sgd(holds: bool | None) -> Assumption:
    holds = check_maybe(holds, "sgd")
    return Assumption("plain SGD, one sample a step, a bias that is not shared", holds)


def _over(lipschitz: Floats, smallest: Floats, updates: Floats | None) -> Floats:
    """λ/σ_min; infinite where σ_min is 0, unless the update is known to be 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(smallest > 0, lipschitz / smallest, math.inf)
    return ratio if updates is None else np.where(updates == 0, 0.0, ratio)


def trajectory_length(
    lipschitz: Numbers, largest: Numbers, smallest: Numbers, updates: Numbers | None = None
) -> tuple[Bound, Bound]:
    """Length Σ r_t of the normalized bias trajectory: Σ λ_t/σ₁ ≤ Σ r_t ≤ Σ λ_t/σ_min(active rows) (Theorem 1).

    Args:
        lipschitz: Local Lipschitz constants λ_t at the samples drawn, one per step.
        largest: σ₁(W₁), one per step or one number.
        smallest: Smallest singular value of the active rows of W₁, one per step or one number.
        updates: Normalized updates r_t where known: steps with r_t = 0 then add nothing to the upper bound.

    Returns:
        The lower and the upper bound.

    Raises:
        InputError: If lengths differ, numbers are negative or not finite, or σ₁ is 0 where λ_t is not.

    Example:
        >>> from excite.bounds import trajectory_length
        >>> low, high = trajectory_length([1.0, 2.0], largest=2.0, smallest=0.5)
        >>> low.value, high.value
        (1.5, 6.0)
    """
    constants = numbers("lipschitz", lipschitz)
    low, high = (numbers(n, v, len(constants)) for n, v in (("smallest", smallest), ("largest", largest)))
    if ((high == 0) & (constants > 0)).any():
        raise InputError("largest: expected σ₁ > 0 wherever the Lipschitz constant is not 0")
    known = None if updates is None else numbers("updates", updates, len(constants))
    description = "length of the normalized bias trajectory"
    below = float((constants / np.where(high > 0, high, 1.0)).sum())
    above = float(_over(constants, low, known).sum())
    return (
        Bound(f"Theorem 1, {PAPER}", description, below, "lower", {"steps": len(constants)}),
        Bound(f"Theorem 1, {PAPER}, active rows", description, above, "upper", {"steps": len(constants)}),
    )


def bias_variance(
    rates: Numbers,
    errors: Numbers,
    lipschitz: Numbers,
    sigma: Numbers,
    *,
    form: Literal["tight", "stated"] = "tight",
    sgd: bool | None = None,
) -> Bound:
    """Variance of the first bias over an interval of steps, bounded from below (Corollary 2).

    With |T| steps and m = |T| + 1 iterates, the mean of ‖bᵗ − mean b‖² is at least
    (|T|/m) · c · (mean of α_t λ_t/σ₁)² · (harmonic mean of ε_t²). Neighbouring iterates differ by
    Σ‖bᵗ⁺¹ − bᵗ‖² ≤ μ Σ‖bᵗ − mean b‖² with μ = 4cos²(π/2m), the largest eigenvalue of the Laplacian of a path; c = 1/μ. The
    stated form has c = 1/4. As printed the factor |T|/m is missing and the variance is over T's own |T| iterates.

    Args:
        rates: Learning rates α_t, one per step or one number.
        errors: Loss derivatives ε_t, one per step.
        lipschitz: Local Lipschitz constants λ_t, one per step.
        sigma: σ₁(W₁), one per step or one number.
        form: "tight" or "stated".
        sgd: Whether the run was plain SGD at batch size one with a bias that is not shared; None if unknown.

    Returns:
        A lower bound on the variance.

    Raises:
        InputError: If lengths differ, numbers are negative or not finite, or ``form`` is unknown.

    Example:
        >>> from excite.bounds import bias_variance
        >>> round(bias_variance(0.1, [1.0, 1.0], [1.0, 1.0], 1.0, sgd=True).value, 6)
        0.002222
    """
    constants = numbers("lipschitz", lipschitz)
    steps = len(constants)
    alpha, epsilon, top = (numbers(n, v, steps) for n, v in (("rates", rates), ("errors", errors), ("sigma", sigma)))
    if form not in ("tight", "stated"):
        raise InputError(f"form: expected 'tight' or 'stated'; got {form!r}")
    if ((top == 0) & (constants > 0)).any():
        raise InputError("sigma: expected σ₁ > 0 wherever the Lipschitz constant is not 0")
    m = steps + 1
    mu = 4 * math.cos(math.pi / (2 * m)) ** 2 if form == "tight" else 4.0
    speed = float((alpha * constants / np.where(top > 0, top, 1.0)).mean())
    harmonic = steps / float((1 / epsilon**2).sum()) if (epsilon > 0).all() else 0.0
    terms = {"steps": steps, "speed": speed, "harmonic": math.sqrt(harmonic), "constant": steps / m / mu}
    return Bound(
        f"Corollary 2, {PAPER}, over |T| + 1 iterates",
        "variance of the first layer's bias",
        steps / m / mu * speed**2 * harmonic,
        "lower",
        terms,
        (_sgd(sgd),),
    )


def bias_distance(
    rates: Numbers,
    errors: Numbers,
    lipschitz: Numbers,
    smallest: Numbers,
    *,
    updates: Numbers | None = None,
    sgd: bool | None = None,
) -> Bound:
    """Distance of the first bias from its start: ‖b^τ − b⁰‖ ≤ Σ_{t<τ} α_t ε_t λ_t / σ_min(active rows) (Corollary 3), for any loss.

    Infinite as soon as one step has more active rows than inputs.

    Args:
        rates: Learning rates α_t, one per step or one number.
        errors: Loss derivatives ε_t, one per step.
        lipschitz: Local Lipschitz constants λ_t, one per step.
        smallest: Smallest singular value of the active rows of W₁, one per step or one number.
        updates: Normalized updates r_t where known; ``terms["path"]`` is then Σ α_t ε_t r_t, the length of the bias's own path,
            which is never more.
        sgd: Whether the run was plain SGD at batch size one with a bias that is not shared; None if unknown.

    Returns:
        An upper bound on the distance.

    Raises:
        InputError: If lengths differ, or numbers are negative or not finite.

    Example:
        >>> from excite.bounds import bias_distance
        >>> bias_distance(0.5, [1.0, 1.0], [1.0, 2.0], 0.5, sgd=True).value
        3.0
    """
    constants = numbers("lipschitz", lipschitz)
    steps = len(constants)
    alpha, epsilon, low = (
        numbers(n, v, steps) for n, v in (("rates", rates), ("errors", errors), ("smallest", smallest))
    )
    known = None if updates is None else numbers("updates", updates, steps)
    ratio = _over(constants, low, known)
    moved = alpha * epsilon
    value = float(np.where(moved > 0, moved * np.where(moved > 0, ratio, 0.0), 0.0).sum())
    terms = {"steps": steps, "without bound": int(np.isinf(ratio).sum())}
    if known is not None:
        terms["path"] = float((moved * known).sum())  # type: ignore[assignment]
    return Bound(
        f"Corollary 3, {PAPER}, active rows",
        "distance of the first layer's bias to its initialization",
        value,
        "upper",
        terms,
        (_sgd(sgd),),
    )
