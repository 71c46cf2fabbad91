"""The margin of a linear classifier trained with cross-entropy: Theorem 2 of Persistency of excitation.

Gradient descent on Σ log(1 + exp(−s(w·x + b))) over separable points goes, in direction, to the (w, B) of least norm
‖w‖² + B² with s(w·x + B) ≥ 1. Then w = Σ a s x and B = Σ a s with a ≥ 0 on the support vectors, so that a unit vector r
with r·x = Δ on all of these has w·r = BΔ: what w spends there separates nothing. Lengths are of the 2-norm.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from excite.bounds.bound import Assumption, Bound
from excite.bounds.excitation.hard_margin import (
    SEPARABLE,
    Array,
    Hyperplane,
    Unsolved,
    array,
    half_distance,
    limit_hyperplane,
    margin_of,
    optimal_hyperplane,
    separation,
    signed,
)
from excite.errors import InputError

PAPER = "Persistency of excitation"
SUPPORT = 1e-7  # how far a support vector may lie behind the foremost one, relative to half the distance of the classes
FLAT = 1e-9  # singular values below this, relative to the size of the points, are directions the points do not use
SOLVED = 1e-9


def linear_margin(x: Any, y: Any, weight: Any = None, bias: Any = None, *, angle: float = 0.1) -> Bound:
    """Margin of a linear classifier trained with cross-entropy: margin ≤ 1 / √(1/γ² + B² Σ Δ_k²) (Theorem 2).

    (w, B) is the limit of gradient descent, scaled so that w·x lies two apart on the classes; r_k, Δ_k are the normals and
    offsets of the affine subspace of its support vectors, so that ΣΔ_k² is its squared distance from the origin; γ is the
    optimal margin *of the support vectors*. As printed, with the optimal margin of all points (``terms["printed"]``), the
    statement fails. Any larger set of points that is taken for support vectors keeps the bound true, so that the tolerance
    in finding them is safe. Lengths are of the 2-norm.

    Args:
        x: Points (N, n), separable by a hyperplane.
        y: Labels (N,) in {0, 1}.
        weight: Weight (n,) of a trained classifier. Without it the bound is on the margin of the limit; with it on the margin
            of that classifier, widened by how far its direction is from the limit (``terms["angle"]``).
        bias: Bias of the trained classifier.
        angle: Largest distance from the limit, in radians, at which training counts as converged.

    Returns:
        An upper bound on the margin.

    Raises:
        InputError: If labels are not 0 and 1, or shapes do not fit.

    Example:
        >>> from excite.bounds import linear_margin
        >>> bound = linear_margin([[5.0, 0.0], [5.0, 1.0]], [0, 1])  # the optimal margin is 0.5
        >>> bound.holds, round(bound.value, 4), round(bound.terms["limit margin"], 4)
        (True, 0.4977, 0.4977)
    """
    points, s = signed(x, y)
    trained = _classifier(points, weight, bias)
    checks = list(separable(points, s))
    name, quantity = f"Theorem 2, {PAPER}", "margin of the classifier" if trained else "margin of the limit classifier"
    if not all(c.held for c in checks):
        return Bound(name, quantity, None, "upper", {}, tuple(checks))
    try:
        limit, best = limit_hyperplane(points, s), optimal_hyperplane(points, s)
        w, b, support = two_apart(limit, points, s)
        hyperplane = optimal_hyperplane(points[support], s[support])
    except Unsolved as error:
        return Bound(name, quantity, None, "upper", {}, (*checks, unsolved(error)))
    basis, nearest = affine_subspace(points[support])
    spent = b**2 * float(nearest @ nearest)
    value = 1 / math.sqrt(1 / hyperplane.margin**2 + spent)
    terms = {
        "optimal margin of the support vectors": hyperplane.margin, "optimal margin": best.margin, "B": b,
        "dimension of the subspace": len(basis), "distance of the subspace": float(np.linalg.norm(nearest)),
        "support": np.flatnonzero(support), "limit weight": w,
        "limit margin": margin_of(limit.weight, limit.bias, points, s), "limit value": value,
        "printed": 1 / math.sqrt(1 / best.margin**2 + spent),
    }  # fmt: skip
    worst = max(limit.gap, best.gap, hyperplane.gap)
    checks.append(Assumption("the hyperplanes are solved", worst <= SOLVED, f"largest duality gap {worst:.1e}"))
    if trained:
        value, off = _widened(value, limit, points[support], *trained)
        terms |= {"angle": off, "margin": margin_of(*trained, points, s)}
        checks.append(
            Assumption("training has converged in direction", off <= angle, f"{off:.2e} rad to go, at most {angle:g}")
        )
    return Bound(name, quantity, value, "upper", terms, tuple(checks))


def linear_margin_any_time(
    x: Any, y: Any, weight: Any, bias: Any, initial_weight: Any = None, initial_bias: Any = None
) -> Bound:
    """Theorem 2 before convergence: margin ≤ 1 / √(1/γ² + Σ c_k²) with c_k = r_k·w₀ + (b − b₀)Δ_k, scaled as in Theorem 2.

    Here r_k, Δ_k are the normals and offsets of the affine subspace of *all* points and γ the optimal margin of all points.
    Every gradient is Σ a_i (x_i, 1), so c_k = r_k·w from the first step on, whatever the loss of w·x + b, the step size, the
    momentum or the batches; weight decay and coordinate-wise rescaling (Adam) break it.

    Args:
        x: Points (N, n), separable by a hyperplane.
        y: Labels (N,) in {0, 1}.
        weight: Weight (n,) of the classifier.
        bias: Its bias.
        initial_weight: Weight that training started from; zero by default.
        initial_bias: Bias that training started from; zero by default.

    Returns:
        An upper bound on the margin of the classifier.

    Raises:
        InputError: If labels are not 0 and 1, shapes do not fit, or no classifier is passed.

    Example:
        >>> from excite.bounds import linear_margin_any_time
        >>> bound = linear_margin_any_time([[5.0, 0.0], [5.0, 1.0]], [0, 1], weight=[0.1, 2.0], bias=0.02)
        >>> round(bound.value, 4)
        0.4994
    """
    points, s = signed(x, y)
    classifier = _classifier(points, weight, bias)
    begun = _classifier(points, initial_weight, initial_bias, zero=True) or (np.zeros(points.shape[1]), 0.0)
    if classifier is None:
        raise InputError("linear_margin_any_time: expected the weight and the bias of a classifier; got None")
    (w, b), (start, start_bias) = classifier, begun
    checks = list(separable(points, s))
    name, quantity = f"Theorem 2 at any time, after {PAPER}", "margin of the classifier"
    if not all(c.held for c in checks):
        return Bound(name, quantity, None, "upper", {}, tuple(checks))
    try:
        best, apart = optimal_hyperplane(points, s), half_distance(w, points, s)
    except Unsolved as error:
        return Bound(name, quantity, None, "upper", {}, (*checks, unsolved(error)))
    basis, nearest = affine_subspace(points)
    moved = _across(basis, start) + (b - start_bias) * nearest  # Σ c_k r_k
    off = float(np.linalg.norm(_across(basis, w) - moved) / np.linalg.norm(w))
    spent = max(0.0, float(np.linalg.norm(moved) / np.linalg.norm(w)) - off)  # rounding during training stays harmless
    checks += [
        Assumption("the hyperplane is solved", best.gap <= SOLVED, f"duality gap {best.gap:.1e}"),
        Assumption("the weight separates the classes", apart > 0, f"half distance {apart:.4g}"),
        Assumption("steps lie in the span of the points", off <= 1e-3, f"relative distance {off:.1e}"),
    ]
    value = 1 / math.sqrt(1 / best.margin**2 + (spent / apart) ** 2) if apart > 0 else None
    terms = {
        "optimal margin": best.margin,
        "dimension of the subspace": len(basis),
        "distance of the subspace": float(np.linalg.norm(nearest)),
        "margin": margin_of(w, b, points, s),
    }
    return Bound(name, quantity, value, "upper", terms, tuple(checks))


def affine_subspace(points: Array) -> tuple[Array, Array]:
    """The smallest affine subspace of the points: orthonormal rows along it (d, n), and its point nearest to the origin.

    With orthonormal normals r_k, r_k·x = Δ_k, that point is ΣΔ_k r_k.
    """
    centre = points.mean(0)
    _, sizes, rows = np.linalg.svd(points - centre, full_matrices=False)
    basis = rows[sizes > FLAT * max(1e-300, float(np.abs(points).max()))]
    return basis, _across(basis, centre)


def _across(basis: Array, vector: Array) -> Array:
    """The part of a vector across the subspace: Σ (r_k·vector) r_k."""
    return np.asarray(vector - (basis @ vector) @ basis)


def _classifier(points: Array, weight: Any, bias: Any, *, zero: bool = False) -> tuple[Array, float] | None:
    if (weight is None) != (bias is None):
        raise InputError("expected weight and bias together, or neither")
    if weight is None:
        return None
    w = array("weight", weight, 1, 2)
    if w.ndim == 2 and len(w) != 1:
        raise InputError(f"weight: expected one output, shape (n,) or (1, n); got {w.shape}")
    w, b = w.reshape(-1), array("bias", bias, 0, 1).reshape(-1)
    if w.shape != points.shape[1:] or b.shape != (1,) or not (zero or w.any()):
        raise InputError(
            f"expected a weight ({points.shape[1]},) other than zero and one bias; got {w.shape}, {b.shape}"
        )
    return w, float(b[0])


def separable(points: Array, s: Array) -> tuple[Assumption, ...]:
    """Checks that both classes have points and that a hyperplane separates them."""
    counts = int((s > 0).sum()), int((s < 0).sum())
    assumption = Assumption(
        "both classes have points", min(counts) > 0, f"{counts[0]} with label 1, {counts[1]} with label 0"
    )
    if not assumption.held:
        return (assumption,)
    t = separation(points, s)
    return assumption, Assumption("a hyperplane separates the classes", t > SEPARABLE, f"largest relative gap {t:.2e}")


def unsolved(error: Unsolved) -> Assumption:
    """Returns the failed assumption for a hyperplane that the solver did not find."""
    return Assumption("the hyperplanes are solved", False, str(error))


def two_apart(limit: Hyperplane, points: Array, s: Array) -> tuple[Array, float, Any]:
    """w and B scaled so that w·x is two apart on the classes, and which points are support vectors."""
    scale = 1 / (limit.margin * float(np.linalg.norm(limit.weight)))
    w, b = limit.weight * scale, limit.bias * scale
    along = s * (points @ w)
    front = np.where(s > 0, along[s > 0].min(), along[s < 0].min())
    return w, b, along <= front + SUPPORT


def _widened(value: float, limit: Hyperplane, support: Array, w: Array, b: float) -> tuple[float, float]:
    """The bound on the limit's margin moved to a classifier off by e, both of norm one in (w, b).

    (w + e_w)·x + b + e_b ≤ w·x + b + ‖e‖‖(x, 1)‖ for the nearest support vector, and ‖w + e_w‖ ≥ ‖w‖ − ‖e‖.
    """
    z, t = np.r_[limit.weight, limit.bias], np.r_[w, b]
    z, t = z / np.linalg.norm(z), t / np.linalg.norm(t)
    e, norm = float(np.linalg.norm(z - t)), float(np.linalg.norm(z[:-1]))
    angle = 2 * math.asin(min(1.0, e / 2))
    if e >= norm:
        return math.inf, angle
    max_norm = math.sqrt(1 + float((support**2).sum(1).max()))
    return (norm * value + e * max_norm) / (norm - e), angle
