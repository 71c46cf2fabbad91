"""Support vectors that nearly lie in an affine subspace: Corollary 2 of Persistency of excitation.

With w = Σ a s x and B = Σ a s, a ≥ 0, a unit vector r with r·x ≥ Δ on support vectors of label 1 and ≤ Δ on the others has
w·r ≥ BΔ. Where BΔ ≥ 0 this bounds ‖w‖ from below, and the margin from above.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.optimize import nnls

from excite.bounds.bound import Assumption, Bound
from excite.bounds.excitation.cross_entropy import PAPER, SOLVED, separable, two_apart, unsolved
from excite.bounds.excitation.hard_margin import Array, Unsolved, array, limit_hyperplane, margin_of, signed
from excite.errors import InputError


def relaxed_linear_margin(x: Any, y: Any, directions: Any = None, offsets: Any = None) -> Bound:
    """Theorem 2 for support vectors near an affine subspace: margin ≤ 1 / (|B| √ΣΔ_k²) (Corollary 2).

    The r_k are orthonormal with r_k·x ≥ Δ_k on support vectors with label 1 and ≤ Δ_k on the others; B is that of
    `linear_margin`. It needs BΔ_k ≥ 0, which the paper does not say.

    Args:
        x: Points (N, n), separable by a hyperplane.
        y: Labels (N,) in {0, 1}.
        directions: The r_k (K, n). Without them one direction, the best there is, is found by a quadratic program: a set of them
            does no better, as Σ|Δ_k| r_k / ‖Δ‖ with offset ±‖Δ‖ is one direction with the same bound.
        offsets: The Δ_k (K,); the best ones by default.

    Returns:
        An upper bound on the margin of the limit of gradient descent.

    Raises:
        InputError: If labels are not 0 and 1, shapes do not fit, directions are not orthonormal, or offsets come without them.

    Example:
        >>> from excite.bounds import relaxed_linear_margin
        >>> bound = relaxed_linear_margin([[5.0, 0.0], [5.1, 1.0]], [0, 1])
        >>> bound.terms["limit margin"] <= bound.value
        True
    """
    points, s = signed(x, y)
    rows, levels = _directions(directions, offsets, points.shape[1])
    checks = list(separable(points, s))
    name, quantity = f"Corollary 2, {PAPER}", "margin of the limit classifier"
    if not all(c.held for c in checks):
        return Bound(name, quantity, None, "upper", {}, tuple(checks))
    try:
        limit = limit_hyperplane(points, s)
    except Unsolved as error:
        return Bound(name, quantity, None, "upper", {}, (*checks, unsolved(error)))
    checks.append(Assumption("the hyperplane is solved", limit.gap <= SOLVED, f"duality gap {limit.gap:.1e}"))
    w, b, support = two_apart(limit, points, s)
    up, down = points[support & (s > 0)], points[support & (s < 0)]
    r = _best_direction(up, down, b) if rows is None else rows
    high, low = (up @ r.T).min(0), (down @ r.T).max(0)
    # Any Δ between the two sides will do; the one with the largest BΔ says most.
    chosen = (high if b >= 0 else low) if levels is None else levels
    tolerance = 1e-9 * max(1.0, float(np.abs(points).max()))
    wrong = np.maximum(low - chosen, chosen - high)
    outside = f"furthest outside by {max(0.0, float(wrong.max(initial=0.0))):.2e}"
    listed = f"B = {b:.4g}, offsets " + (", ".join(f"{d:.4g}" for d in chosen[:8]) or "none")
    between = "the offsets lie between the support vectors of the two classes"
    checks.append(Assumption(between, bool((wrong <= tolerance).all()), outside))
    same_sign = bool((b * chosen >= -tolerance * abs(b)).all())
    checks.append(Assumption("B and every offset have the same sign", same_sign, listed))
    spent = abs(b) * float(np.linalg.norm(chosen))
    printed = 1 / spent if spent > 0 else math.inf
    terms = {"B": b, "directions": r, "offsets": chosen, "support": np.flatnonzero(support), "printed": printed,
             "limit weight": w, "limit margin": margin_of(limit.weight, limit.bias, points, s)}  # fmt: skip
    return Bound(name, quantity, printed, "upper", terms, tuple(checks))


def _directions(directions: Any, offsets: Any, n: int) -> tuple[Array | None, Array | None]:
    """Directions (K, n) and offsets (K,) as arrays, checked; None where there are none."""
    if directions is None and offsets is not None:
        raise InputError("relaxed_linear_margin: expected directions where offsets are given")
    rows = None if directions is None else array("directions", directions, 2)
    if rows is not None and (rows.shape[1] != n or np.abs(rows @ rows.T - np.eye(len(rows))).max() > 1e-9):
        raise InputError(f"directions: expected orthonormal rows of length {n}; got shape {rows.shape}")
    levels = None if offsets is None else array("offsets", offsets, 1)
    if levels is not None and rows is not None and len(levels) != len(rows):
        raise InputError(f"offsets: expected one for each of {len(rows)} directions; got {len(levels)}")
    return rows, levels


def _best_direction(up: Array, down: Array, b: float) -> Array:
    """(1, n) unit r with the largest BΔ, r·x ≥ Δ on `up` and ≤ Δ on `down`; (0, n) where no BΔ is positive.

    With B > 0 and r scaled to Δ = 1 it has the least norm with r·x ≥ 1 on `up` and r·x ≤ 1 on `down`; B < 0 swaps them.
    """
    front, back = (up, down) if b >= 0 else (down, up)
    none = np.zeros((0, up.shape[1]))
    if b == 0:
        return none
    rows, right = np.vstack([front, -back]), np.r_[np.ones(len(front)), -np.ones(len(back))]
    size = float(np.abs(rows).max()) or 1.0
    for _ in range(3):  # the second and third time with ‖r‖ near 1, where the least distance problem is precise
        e = np.vstack([rows.T / size, right])
        f = np.r_[np.zeros(rows.shape[1]), 1.0]
        u, _ = nnls(e, f, maxiter=50 * sum(e.shape))
        residual = e @ u - f
        if np.linalg.norm(residual) < 1e-8 or residual[-1] >= 0:
            return none
        r = -residual[:-1] / residual[-1]
        size /= float(np.linalg.norm(r))
    return np.asarray((1 if b > 0 else -1) * r[None] / np.linalg.norm(r))
