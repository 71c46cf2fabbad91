"""Least squares with a power of a norm as penalty, solved to rounding: min ‖y − Xw‖² + λ ‖w‖_p^m, p in 1, 2, ∞.

The problem with c‖w‖_p² is the base: closed form for p = 2, non-negative least squares for p = 1, a least distance problem
for p = ∞. Any other power has the same path of solutions, at another λ.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.linalg import solve_triangular
from scipy.optimize import brentq, nnls

from excite._core.checks import DUAL, Norm
from excite.bounds.excitation.hard_margin import Array
from excite.errors import ExciteError

_MIN_STEP, _MAX_STEP = 1e-6, 1e-3  # weight of a proximal step, relative to ‖X‖
STEPS = 200  # most proximal steps


def size(w: Array, norm: Norm) -> float:
    """Returns ‖w‖ in the 1-, 2- or infinity norm."""
    return float(np.linalg.norm(w, {"1": 1, "2": 2, "inf": np.inf}[norm]))


def penalized_squared(x: Array, y: Array, c: float, norm: Norm) -> Array:
    """argmin ‖y − Xw‖² + c‖w‖²."""
    n = x.shape[1]
    if not (x.T @ y).any():
        return np.zeros(n)
    if norm == "2":
        left, values, right = np.linalg.svd(x, full_matrices=False)
        return np.asarray(right.T @ (values / (values**2 + c) * (left.T @ y)))
    if norm == "inf":
        return _infinity(x, y, c)
    # w = u − v with u, v ≥ 0, and ‖w‖ = Σu + Σv: non-negative least squares with one more row.
    rows = np.vstack([np.hstack([x, -x]), np.full(2 * n, math.sqrt(c))])
    u, _ = nnls(rows, np.r_[y, 0.0], maxiter=50 * sum(rows.shape))
    return np.asarray(u[:n] - u[n:])


def _infinity(x: Array, y: Array, c: float) -> Array:
    """argmin ‖y − Xw‖² + c t² over |w_i| ≤ t: proximal steps, each a least distance problem, then its face exactly."""
    n = x.shape[1]
    # Keeps the triangular factor well conditioned, whatever the rank of X; small beside c, so that few steps are needed.
    near = float(np.linalg.norm(x, 2)) * min(
        max(0.1 * math.sqrt(c) / float(np.linalg.norm(x, 2)), _MIN_STEP), _MAX_STEP
    )
    rows = np.zeros((len(x) + 1, n + 1))
    rows[: len(x), :n], rows[-1, -1] = x, math.sqrt(c)
    q, r = np.linalg.qr(np.vstack([rows, near * np.eye(n + 1)]))
    box = np.block([[np.eye(n), np.ones((n, 1))], [-np.eye(n), np.ones((n, 1))]])  # t + w ≥ 0, t − w ≥ 0
    sides = solve_triangular(r, box.T, trans="T").T
    best, lowest, z, idle = np.zeros(n), math.inf, np.zeros(n + 1), 0
    for _ in range(STEPS):
        middle = q.T @ np.r_[y, 0.0, near * z]
        z = solve_triangular(r, middle + _least_distance(sides, -sides @ middle))
        tries = [z[:n], *(_on_face(x, y, c, z[:n], tolerance) for tolerance in (1e-9, 1e-7, 1e-5, 1e-3))]
        errors = {_slope_error(x, y, c, w): w for w in tries}
        idle = 0 if min(errors) < lowest else idle + 1
        if idle == 0:
            lowest = min(errors)
            best = errors[lowest]
        if lowest < 1e-14 or idle > 3:
            break
    return best


def _slope_error(x: Array, y: Array, c: float, w: Array) -> float:
    """At the solution X'(y − Xw) has 1-norm c‖w‖_∞ and inner product c‖w‖²_∞ with w: how far from it, over ‖X'y‖₁."""
    slopes, t = x.T @ (y - x @ w), float(np.abs(w).max())
    off = abs(float(np.abs(slopes).sum()) - c * t) + abs(float(slopes @ w) / max(t, 1e-300) - c * t)
    return off / float(np.abs(x.T @ y).sum())


def _least_distance(rows: Array, right: Array) -> Array:
    """The vector v of smallest norm with rows @ v ≥ right (Lawson and Hanson).

    With residual (a, b) of the non-negative least squares problem (rows', right') u = (0, 1), v = −a/b. Right sides are divided by
    a number that makes ‖v‖ about one.
    """
    if (right <= 0).all():
        return np.zeros(rows.shape[1])
    unit = float((right / np.linalg.norm(rows, axis=1)).max())
    v = np.zeros(rows.shape[1])
    for _ in range(2):
        e = np.vstack([rows.T, right / unit])
        lengths = np.linalg.norm(e, axis=0)
        f = np.r_[np.zeros(rows.shape[1]), 1.0]
        u, _ = nnls(e / lengths, f, maxiter=50 * sum(e.shape))
        residual = e @ (u / lengths) - f
        v = -residual[:-1] / residual[-1] * unit
        unit = float(np.linalg.norm(v))
    return np.asarray(v)


def _on_face(x: Array, y: Array, c: float, w: Array, tolerance: float) -> Array:
    """The solution with coordinates at ±t where w has them, the others free: one least squares problem in (t, free)."""
    t = float(np.abs(w).max())
    at = np.abs(w) >= t * (1 - tolerance)
    face = np.zeros((len(w), 1 + int((~at).sum())))
    face[at, 0], face[np.flatnonzero(~at), np.arange(1, face.shape[1])] = np.sign(w[at]), 1.0
    last = np.r_[math.sqrt(c), np.zeros(face.shape[1] - 1)]
    return np.asarray(face @ np.linalg.lstsq(np.vstack([x @ face, last]), np.r_[y, 0.0], rcond=None)[0])


def penalized(x: Array, y: Array, penalty: float, norm: Norm, power: float) -> Array:
    """argmin ‖y − Xw‖² + λ‖w‖^m, m ≥ 1. Zero for m = 1 and λ ≥ 2‖X'y‖_q."""
    slope = 2 * size(x.T @ y, DUAL[norm])
    if slope == 0 or (power == 1 and penalty >= slope):
        return np.zeros(x.shape[1])
    if power == 2:
        return penalized_squared(x, y, penalty, norm)

    def excess(log_c: float) -> float:
        # At the solution for c‖w‖² the slopes of both penalties agree where λ m ‖w‖^(m−1) = 2c‖w‖; λ grows with c.
        w = penalized_squared(x, y, math.exp(log_c), norm)
        return log_c + math.log(2 / power) + (2 - power) * math.log(size(w, norm)) - math.log(penalty)

    low = high = math.log(slope)
    step = 1.0
    while excess(low) > 0:
        low, step = low - step, 2 * step
    step = 1.0
    while excess(high) < 0:
        high, step = high + step, 2 * step
        if high > 600:
            raise ExciteError("penalized least squares: the penalty is too close to the one that gives zero")
    log_c = brentq(excess, low, high, xtol=1e-15, rtol=4 * np.finfo(float).eps, maxiter=200) if low < high else low
    return penalized_squared(x, y, math.exp(log_c), norm)


def duality_gap(x: Array, y: Array, w: Array, penalty: float, norm: Norm, power: float) -> float:
    """How far ‖y − Xw‖² + λ‖w‖^m may be above its minimum, over ‖y‖².

    The dual of a residual r is 2r·y − ‖r‖² − h*(2X'r), with h* the conjugate of λ‖·‖^m; for m = 1, r is shrunk until
    ‖2X'r‖_q ≤ λ.
    """
    r = y - x @ w
    value = float(r @ r) + float(penalty * size(w, norm) ** power)
    slope = 2 * size(x.T @ r, DUAL[norm])
    if power == 1:
        r = r * min(1.0, penalty / slope) if slope > 0 else r
        conjugate = 0.0
    else:
        conjugate = float((power - 1) * penalty * (slope / (power * penalty)) ** (power / (power - 1)))
    dual = 2 * float(r @ y) - float(r @ r) - conjugate
    return max(0.0, value - dual) / max(float(y @ y), 1e-300)
