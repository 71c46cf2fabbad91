"""Hyperplanes of least norm: separability, the limit of gradient descent on cross-entropy, the optimal margin.

Points are rows of x (N, n); s (N,) holds their signs, +1 for label 1 and −1 for label 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog, nnls

from excite._core.checks import to_array
from excite.errors import ExciteError, InputError

Array = NDArray[np.float64]
AT_ONCE = 64  # violated constraints that join the working set in one round
ROUNDS = 200
SEPARABLE = 1e-8  # smallest gap between the classes, relative to the size of the data, that counts


class Unsolved(ExciteError):
    """A program has no solution in double precision."""


@dataclass(frozen=True)
class Hyperplane:
    """{x : weight·x + bias = 0}, scaled so that s(weight·x + bias) is at least one, with equality somewhere.

    `margin` is the half distance of the two classes along `weight`; `gap` how far it may be from the optimum, relative
    to it, by duality; `multipliers` (N,) are those of the constraints.
    """

    weight: Array
    bias: float
    multipliers: Array
    margin: float
    gap: float


def array(name: str, values: Any, *dims: int) -> Array:
    """float64 on the CPU from a tensor, an array or numbers; refuses other dimensions and values that are not finite."""
    expected = " or ".join(map(str, dims))
    out = to_array(name, values)
    if out.ndim not in dims:
        raise InputError(f"{name}: expected {expected} dimension(s); got shape {out.shape}")
    if not np.isfinite(out).all():
        raise InputError(f"{name}: expected finite values; got NaN or infinity")
    return out


def signed(x: Any, y: Any) -> tuple[Array, Array]:
    """Points (N, n) and signs (N,) from points and labels in {0, 1}, of shape (N,) or (N, 1)."""
    points = array("points", x, 2)
    labels = array("labels", y, 1, 2)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.shape != (len(points),) or not len(points) or not points.shape[1]:
        raise InputError(f"expected points (N, n) and labels (N,); got {points.shape} and {labels.shape}")
    if not np.isin(labels, (0.0, 1.0)).all():
        raise InputError(f"labels: expected 0 and 1; got {np.unique(labels)[:5]}")
    return points, np.where(labels == 1, 1.0, -1.0)


def separation(x: Array, s: Array, *, bias: bool = True) -> float:
    """The largest t with s(w·x + b) ≥ t, |w_i| ≤ 1, after dividing x by its largest entry: a linear program.

    Positive exactly where a hyperplane (through the origin, if not `bias`) separates the classes.
    """
    if bias:
        x = x - x.mean(0)
    x = _narrow(x)[0]
    size = float(np.abs(x).max())
    if size == 0.0:
        return 0.0
    n = x.shape[1]
    rows = s[:, None] * np.column_stack([x / size, np.full(len(x), float(bias))])
    done = linprog(
        np.r_[np.zeros(n + 1), -1.0],
        A_ub=np.column_stack([-rows, np.ones(len(x))]),
        b_ub=np.zeros(len(x)),
        bounds=[(-1, 1)] * n + [(-n - 1, n + 1), (None, n + 1)],
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if not done.success:
        raise Unsolved(f"the linear program of separability was not solved: {done.message}")
    return float(-done.fun)


def least_norm(rows: Array) -> tuple[Array, Array, float]:
    """z of least norm with rows @ z ≥ 1, multipliers a ≥ 0 with z = rows' a, and the relative duality gap of 1/‖z‖.

    Lawson and Hanson's least distance problem, on a working set of rows that grows by what is violated. The rows must
    be separable. For any a, ‖rows' a‖ / Σa is at least the largest margin and min(rows @ z)/‖z‖ at most: the gap.
    """
    rows, back = _narrow(rows)
    norms = np.linalg.norm(rows, axis=1)
    size = float(norms.max())  # divides the rows, later times the margin: non-negative least squares likes ‖z‖ near 1
    working = np.argsort(norms)[: min(len(rows), AT_ONCE)]
    best: tuple[Array, Array, float] | None = None
    for _ in range(ROUNDS):
        g = rows[working] / size
        # min ‖(g'u, Σu) − (0, 1)‖ over u ≥ 0 has residual (z, −1) / (1 + ‖z‖²), with z the solution.
        u, _ = nnls(np.vstack([g.T, np.ones(len(g))]), np.r_[np.zeros(rows.shape[1]), 1.0], maxiter=50 * sum(g.shape))
        left = 1.0 - u.sum()
        if left <= 0.0 or not u.any():
            break
        active = u > 0
        # On the active rows the constraints are equalities: their solution of least norm is exact to rounding.
        z = np.linalg.lstsq(g[active], np.ones(active.sum()), rcond=None)[0]
        if (g @ z).min() < 1 - 1e-9:
            z = g.T @ u / left
        margins = rows @ z / size
        hull = np.linalg.norm(g.T @ u) / u.sum()
        gap = max(0.0, float(hull * np.linalg.norm(z) / margins.min() - 1.0)) if margins.min() > 0 else np.inf
        if best is None or gap < best[2]:
            a = np.zeros(len(rows))
            a[working] = u / left
            z_full = z / (size * margins.min()) if margins.min() > 0 else z
            a *= float(np.linalg.norm(z_full)) / max(float(np.linalg.norm(rows.T @ a)), 1e-300)
            best = (z_full, a, gap)
        violated = np.setdiff1d(np.flatnonzero(margins < 1 - 1e-12), working)
        rescale = 1.0 / float(np.linalg.norm(z))
        if not len(violated) and (0.5 < rescale < 2.0 or gap < 1e-13):
            break
        size *= rescale
        working = np.union1d(working, violated[np.argsort(margins[violated])[:AT_ONCE]])
    if best is None:
        raise Unsolved("no hyperplane of least norm found: the points are not separable in double precision")
    z, a, gap = best
    return back(z), a, gap


def _narrow(rows: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Rows (N, n) with n > N in N coordinates of their span, and the way back: only the span matters."""
    if rows.shape[1] <= len(rows):
        return rows, lambda z: z
    q, r = np.linalg.qr(rows.T)
    return r.T, lambda z: np.asarray(q @ z)


def limit_hyperplane(x: Array, s: Array) -> Hyperplane:
    """min ‖w‖² + b² with s(w·x + b) ≥ 1: where gradient descent on cross-entropy goes, in direction (Soudry et al.)."""
    z, a, gap = least_norm(s[:, None] * np.column_stack([x, np.ones(len(x))]))
    w = z[:-1]
    return Hyperplane(w, float(z[-1]), a, half_distance(w, x, s), gap)


def optimal_hyperplane(x: Array, s: Array) -> Hyperplane:
    """min ‖w‖² with s(w·x + b) ≥ 1: the support vector machine with a hard margin.

    The least norm of (w, b) is the least norm of w once the origin lies on the solution, so the origin is moved there
    until it does; measuring b in large units makes that quick.
    """
    origin = (x[s > 0].mean(0) + x[s < 0].mean(0)) / 2
    best: Hyperplane | None = None
    for _ in range(30):
        moved = x - origin
        unit = 100.0 * float(np.linalg.norm(moved, axis=1).max())
        z, a, _ = least_norm(s[:, None] * np.column_stack([moved, np.full(len(x), unit)]))
        w = z[:-1]
        margin = half_distance(w, x, s)
        up, down = (a[s == sign] for sign in (1, -1))
        if margin > 0 and up.sum() > 0 and down.sum() > 0:
            hulls = up @ moved[s > 0] / up.sum() - down @ moved[s < 0] / down.sum()
            gap = max(0.0, float(np.linalg.norm(hulls) / (2 * margin) - 1.0))
            if best is None or gap < best.gap:
                projected = x @ w
                middle = (projected[s > 0].min() + projected[s < 0].max()) / 2
                scale = 1.0 / (margin * np.linalg.norm(w))
                best = Hyperplane(w * scale, float(-middle * scale), a * scale, margin, gap)
            if gap < 1e-13:
                break
        origin = origin - w * (z[-1] * unit) / (w @ w)
    if best is None:
        raise Unsolved("no optimal hyperplane found: the classes are not separable in double precision")
    return best


def half_distance(w: Array, x: Array, s: Array) -> float:
    """(min over label 1 of w·x − max over label 0 of w·x) / 2‖w‖: at least the margin of any w·x + b."""
    projected = x @ w
    return float((projected[s > 0].min() - projected[s < 0].max()) / (2 * np.linalg.norm(w)))


def margin_of(w: Array, b: float, x: Array, s: Array) -> float:
    """Distance of the nearest point to {w·x + b = 0}, negative where it lies on the wrong side."""
    return float((s * (x @ w + b)).min() / np.linalg.norm(w))
