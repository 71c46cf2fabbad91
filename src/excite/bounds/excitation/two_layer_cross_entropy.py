"""Two-layer networks f(x) = w·(Vx + b)₊ trained with cross-entropy: Theorem 3 of Persistency of excitation.

With θ = (w, V, b) scaled so that the smallest s f(x) is one, gradient flow that converges in direction ends where
θ = Σ μ_s s ∂f(x_s)/∂θ, μ ≥ 0 on the support vectors. Then |w_k| = ‖(V_k, b_k)‖, the Lipschitz constant is at most
Σ |w_k| ‖V_k‖ ≤ ½‖θ‖² = Σ μ, and ‖Σ_k μ_s s (x_s, 1)‖ = 1 over the support vectors that activate unit k, which bounds their μ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import LinearConstraint, milp, nnls

from excite.bounds.bound import Assumption, Bound
from excite.bounds.excitation.hard_margin import Array, Unsolved, array, least_norm, separation, signed
from excite.errors import InputError

PAPER = "Persistency of excitation"
SECONDS = 10.0  # for the smallest cover; after it the best one found is used, which is a cover too


def directional_lipschitz(
    hidden_weight: Any, hidden_bias: Any, output_weight: Any, x: Any, y: Any, *, support: float = 0.2, kink: float = 1e-2,
    residual: float = 0.1,
) -> Bound:  # fmt: skip
    """Lipschitz constant (2-norm) of f / min s f(x) for f(x) = w·(Vx + b)₊ trained with cross-entropy (Theorem 3).

    value = m Σ_{k in K} ρ_k c_k + slack, with K the cheapest set of units that covers the support vectors and
    c_k = 1 / (distance of the origin to the hull of s(x, 1) over the support vectors that activate unit k or lie on its
    kink). In the limit of training ρ = m = 1 and the slack is 0; before it all three follow from what is left of the
    stationarity, so that ``terms["at any time"]`` holds at any weights. 1/value is a margin in the input space.

    ``terms["stated"]`` is the paper's n_node √(n_sup / λ). It needs linearly independent support vectors, and fails where one
    lies on a kink, which is where training often puts them. The theorem has no output bias.

    Args:
        hidden_weight: V (r, n).
        hidden_bias: b (r,).
        output_weight: w (r,) or (1, r).
        x: Training points (N, n).
        y: Labels (N,) in {0, 1}.
        support: Points with s f(x) ≤ (1 + support) times the smallest count as support vectors; their multipliers are found
            by non-negative least squares.
        kink: Largest cosine at which a point counts as lying on the kink of a unit; it then has a multiplier of its own.
        residual: Largest relative residual at which training counts as converged in direction.

    Returns:
        An upper bound on the Lipschitz constant over the smallest margin of the outputs.

    Raises:
        InputError: If labels are not 0 and 1, or shapes do not fit.

    Example:
        >>> from excite.bounds import directional_lipschitz
        >>> V, b, w = [[0.5], [-0.5]], [0.5, 0.5], [0.5**0.5, -(0.5**0.5)]
        >>> bound = directional_lipschitz(V, b, w, [[1.0], [-1.0]], [1, 0])
        >>> bound.holds, round(bound.value, 3)
        (True, 1.707)
    """
    points, s = signed(x, y)
    v, b, w, outputs = _network(hidden_weight, hidden_bias, output_weight, points.shape[1])
    scalar = Assumption("the output is scalar", outputs == 1, f"{outputs} outputs")
    name, quantity = f"Theorem 3, {PAPER}", "Lipschitz constant over the smallest margin of the outputs"
    if not scalar.held:
        return Bound(name, quantity, None, "upper", {}, (scalar,))
    margins = s * (np.maximum(points @ v.T + b, 0) @ w)
    right = Assumption(
        "all points are classified correctly", bool(margins.min() > 0), f"smallest output {margins.min():.3g}"
    )
    if not right.held:
        return Bound(name, quantity, None, "upper", {}, (scalar, right))
    total, balance, off, terms = _theorem_3(v, b, w, points, s, margins, support, kink)
    checks = (
        scalar,
        right,
        Assumption(
            "training has converged in direction", off <= residual, f"‖e‖/‖θ‖ = {off:.2e}, at most {residual:g}"
        ),
        Assumption("the layers are balanced", balance <= residual, f"|‖w‖² − ‖(V, b)‖²|/‖θ‖² = {balance:.2e}"),
    )
    return Bound(name, quantity, total, "upper", terms, checks)


def _theorem_3(
    v: Array, b: Array, w: Array, points: Array, s: Array, margins: Array, support: float, kink: float
) -> tuple[float, float, float, dict[str, Any]]:
    """The bound at any time, the imbalance of the layers, the relative residual of stationarity, and the terms."""
    scale = 1 / math.sqrt(float(margins.min()))  # f has degree two in θ
    hidden, w = np.column_stack([v, b]) * scale, w * scale  # (r, n + 1), (r,)
    near = np.flatnonzero(margins <= (1 + support) * margins.min())
    signs = s[near, None] * np.column_stack([points[near], np.ones(len(near))])  # s(x, 1): (S, n + 1)
    before = points[near] @ hidden[:, :-1].T + hidden[:, -1]  # (S, r)
    cosine = np.abs(before) / np.maximum(
        np.linalg.norm(signs, axis=1)[:, None] * np.linalg.norm(hidden, axis=1), 1e-300
    )
    on_kink = (cosine <= kink) & (w != 0)
    active = (before > 0) & ~on_kink
    multipliers = _multipliers(hidden, w, signs, s[near], before, active, on_kink)
    costs = np.array([_inverse_distance(signs[used]) for used in multipliers.used.T]) if len(near) else np.zeros(0)
    costs = np.where(multipliers.lengths > 0, costs * np.maximum(multipliers.lengths, 1e-300), math.inf)
    cover, exact = smallest_cover(active[multipliers.mu > 0], costs)
    total = multipliers.largest * float(costs[cover].sum()) + multipliers.slack if cover is not None else math.inf
    balance = float(abs((w**2).sum() - (hidden**2).sum()) / ((w**2).sum() + (hidden**2).sum()))
    alive = np.abs(w) > 1e-6 * np.abs(w).max()
    terms = {
        **_stated((before > 0)[:, alive], points[near]),
        "at any time": total,
        "support": near,
        "multipliers": multipliers.mu,
        "on a kink": int(on_kink.sum()),
        "cover": cover,
        "cover is smallest": exact,
        "costs": costs,
        "slack": multipliers.slack,
        "residual": multipliers.residual,
        "units never active": np.flatnonzero(~(points @ v.T + b > 0).any(0)),
        "sum of |w| ‖V‖": float(np.abs(w) @ np.linalg.norm(hidden[:, :-1], axis=1)),
    }
    return total, balance, multipliers.residual, terms


@dataclass(frozen=True)
class _Multipliers:
    mu: Array  # (S,)
    used: Any  # (S, r): which support vectors pull on which unit
    lengths: Array  # (r,): ρ_k
    largest: float  # m
    slack: float
    residual: float


def _multipliers(
    hidden: Array, w: Array, signs: Array, s: Array, before: Array, active: Any, on_kink: Any
) -> _Multipliers:
    """θ = Σ μ_s s ∂f(x_s) + Σ ν_sk s w_k (x_s, 1) + e with μ, ν ≥ 0, the ν for units on whose kink x_s lies.

    ½‖θ‖² = ½⟨θ, θ⟩ is then Σ μ_s q_s + Σ ν_sk r_sk + ½⟨θ, e⟩, q_s = ½⟨θ, s ∂f⟩: s f(x_s) up to kinks, where r_sk is near 0.
    """
    theta = np.column_stack([w, hidden])  # (r, n + 2)
    output = s[:, None] * np.where(active, before, 0.0)
    pulls = active[:, :, None] * w[:, None] * signs[:, None, :]  # (S, r, n + 1)
    slopes = np.concatenate([output[:, :, None], pulls], 2).reshape(len(signs), theta.size)
    at, unit = np.nonzero(on_kink)
    extra = np.zeros((len(at), *theta.shape))
    extra[np.arange(len(at)), unit, 1:] = w[unit, None] * signs[at]
    columns = np.vstack([slopes, extra.reshape(len(at), theta.size)])
    multipliers, distance = nnls(columns.T, theta.reshape(-1), maxiter=100 * sum(columns.shape))
    mu, nu = multipliers[: len(signs)], multipliers[len(signs) :]
    weights = mu[:, None] * active
    weights[at, unit] += nu
    error = theta.reshape(-1) - multipliers @ columns
    halves = 0.5 * columns @ theta.reshape(-1)
    residual = max(0.0, float(nu @ halves[len(signs) :])) + 0.5 * max(0.0, float(theta.reshape(-1) @ error))
    return _Multipliers(
        mu,
        weights > 0,
        np.linalg.norm(weights.T @ signs, axis=1),
        float(halves[: len(signs)][mu > 0].max(initial=0.0)),
        residual,
        float(distance / np.linalg.norm(theta)),
    )


def smallest_cover(active: Any, costs: Array | None = None) -> tuple[NDArray[np.intp] | None, bool]:
    """Finds the cheapest set of columns of `active` (S, r) with a true entry in every row.

    Returns its indices, None where there is no finite one, and whether it is proved to be cheapest. Every column costs one without
    `costs`.
    """
    active = np.asarray(active, dtype=bool)
    price = np.ones(active.shape[1]) if costs is None else costs
    usable = np.flatnonzero(np.isfinite(price) & active.any(0))
    if not active[:, usable].any(1).all():
        return None, True
    if not len(active):
        return usable[:0], True
    unit = float(price[usable].max()) or 1.0
    done = milp(
        price[usable] / unit + 1e-9,
        constraints=LinearConstraint(active[:, usable].astype(float), lb=1),
        integrality=np.ones(len(usable)),
        bounds=(0, 1),
        options={"time_limit": SECONDS},
    )
    if done.x is None:
        return usable, False
    return usable[done.x > 0.5], bool(done.status == 0)


def _stated(active: Any, points: Array) -> dict[str, Any]:
    """The bound n_node √(n_sup / λ) as printed.

    λ is the smallest eigenvalue of X_k'X_k over units, where the columns of X_k are the support vectors that activate unit k.
    """
    columns = [a for a in active.T if a.any()]
    smallest = min((float(np.linalg.eigvalsh(points[a] @ points[a].T)[0]) for a in columns), default=0.0)
    size = float((points**2).sum(1).max(initial=0.0))
    smallest = smallest if smallest > 1e-12 * size else 0.0
    cover, _ = smallest_cover(active)
    n_node = len(cover) if cover is not None else math.inf
    n_sup = int(max((a.sum() for a in columns), default=0))
    stated = n_node * math.sqrt(n_sup / smallest) if smallest > 0 else math.inf
    return {"stated": stated, "n_node": n_node, "n_sup": n_sup, "lambda": smallest}


def _inverse_distance(rows: Array) -> float:
    """1 / distance of the origin to the hull of the rows; infinite if it lies inside."""
    if not len(rows) or separation(rows, np.ones(len(rows)), bias=False) <= 1e-9:
        return math.inf
    try:
        z, _, gap = least_norm(rows)
    except Unsolved:
        return math.inf
    # 1/‖z‖ is at most the distance, so that a gap leaves ‖z‖ on the safe side.
    return float(np.linalg.norm(z)) if math.isfinite(gap) else math.inf


def _network(hidden_weight: Any, hidden_bias: Any, output_weight: Any, n: int) -> tuple[Array, Array, Array, int]:
    v, b = array("hidden_weight", hidden_weight, 2), array("hidden_bias", hidden_bias, 1)
    w = array("output_weight", output_weight, 1, 2)
    rows = w if w.ndim == 2 else w[None]
    if v.shape != (len(b), n) or rows.shape[1] != len(b) or not len(b):
        raise InputError(f"expected V (r, {n}), b (r,) and w (r,) or (1, r); got {v.shape}, {b.shape} and {w.shape}")
    return v, b, rows[0], len(rows)
