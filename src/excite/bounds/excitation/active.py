"""How many hidden units one point can activate, by a small mixed-integer program."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from excite._core.checks import check_number, to_array
from excite.errors import InputError

_STRICT = 1e-9  # of a normalized row: a region smaller than this cannot be distinguished from an empty one


@dataclass(frozen=True)
class MostActive:
    """Result of `most_active`: max over x of Σ c_k over the units with V_k x + b_k > 0.

    Args:
        value: The maximum if ``exact``, else an upper bound on it.
        found: The weight reached at ``point``: a lower bound on the maximum.
        exact: Whether the two agree.
        units: The units that are active at ``point``.
        point: An input at which they are.

    Example:
        >>> import numpy as np
        >>> from excite.bounds import most_active
        >>> most_active(np.array([[1.0], [-1.0]]), np.zeros(2)).value  # the two units exclude each other
        1.0
    """

    value: float
    found: float
    exact: bool
    units: tuple[int, ...]
    point: tuple[float, ...]


def most_active(
    V: np.ndarray, b: np.ndarray, weights: np.ndarray | None = None, *, seconds: float = 10.0
) -> MostActive:
    """Largest total weight of hidden units that one input activates: max over x of Σ c_k over units with V_k x + b_k > 0.

    Solved as a small mixed-integer program. The result is exact unless the solver runs out of time, or regions are so thin
    that rounding decides whether they exist; then it is an upper bound. Strict inequalities and unbounded regions are
    handled on the half sphere: x = u/s with max(|u_j|, s) = 1 and s ≥ 0, where V_k u + b_k s ≥ 0 is required. In general
    position a choice that meets this closed condition has an open region; a linear program searches for a point inside,
    and if there is none its dual names units that exclude each other, which are a constraint of the next program.

    Args:
        V: Weights (r, n) of r hidden units.
        b: Biases (r,).
        weights: c_k ≥ 0 (r,); one each by default, which counts units.
        seconds: Time limit of the solver.

    Returns:
        The maximum, a point that reaches it, and whether it is exact.

    Raises:
        InputError: If shapes do not fit, or numbers are not finite, or a weight is negative.

    Example:
        >>> import numpy as np
        >>> from excite.bounds import most_active
        >>> most = most_active(np.array([[1.0], [-1.0], [2.0]]), np.array([0.0, 0.0, -1.0]))
        >>> most.value, most.units, most.exact  # units 0 and 1 exclude each other
        (2.0, (0, 2), True)
    """
    V, b, seconds = to_array("V", V), to_array("b", b), check_number(seconds, "seconds", 0)
    weights = None if weights is None else to_array("weights", weights)
    if V.ndim != 2 or not V.shape[1] or b.shape != V.shape[:1] or (weights is not None and weights.shape != b.shape):
        raise InputError(f"expected V (units, inputs) and one bias and weight a unit; got {V.shape} and {b.shape}")
    if not (np.isfinite(V).all() and np.isfinite(b).all()) or (
        weights is not None and not ((weights >= 0) & np.isfinite(weights)).all()
    ):
        raise InputError("expected finite V and b, and finite weights that are not negative")
    r, n = V.shape
    c = np.ones(r) if weights is None else weights
    # Constant units are on everywhere or nowhere.
    constant = ~V.any(axis=1)
    base = float(c[constant & (b > 0)].sum())
    moving = np.flatnonzero(~constant)
    upper, point = 0.0, np.zeros(n)
    if len(moving):
        unit = float(np.abs(b[moving]).max() / np.abs(V[moving]).max()) or 1.0  # x is measured in it
        rows = np.column_stack([V[moving], b[moving] / unit])
        rows /= np.abs(rows).sum(axis=1, keepdims=True)
        upper, point = _search(rows, c[moving], seconds)
        point = point * unit
    on = np.flatnonzero(V @ point + b > 0)
    attained, value = float(c[on].sum()), upper + base
    if weights is None:
        value = float(np.floor(value + 1e-6))
    exact = attained >= value * (1 - 1e-9)
    return MostActive(max(value, attained), attained, bool(exact), tuple(on.tolist()), tuple(point.tolist()))


def _search(rows: np.ndarray, c: np.ndarray, seconds: float) -> tuple[float, np.ndarray]:
    """An upper bound on the weight, and a point that reaches it if it is exact."""
    point, _ = _inside(rows)
    if point is not None:
        return float(c.sum()), point
    end = time.monotonic() + seconds
    cuts: list[np.ndarray] = []
    upper, best = float(c.sum()), np.zeros(rows.shape[1] - 1)
    while (left := end - time.monotonic()) > 0:
        chosen, above = _solve(rows, c, cuts, left)
        upper = min(upper, above)
        if not len(chosen):
            break
        point, clash = _inside(rows[chosen])
        if point is not None:
            return upper, point
        if not len(clash):
            break
        cuts.append(chosen[clash])
    return upper, best


def _inside(rows: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """A point x with rows·(x, 1) > 0 well inside, or None and the rows that exclude it.

    Maximizes ε with rows·(u, s) ≥ ε on the unit cube, s ≥ 0. If no more than 0 is reached, the dual has λ ≥ 0 with Σ λ = 1 and
    Σ λ_k rows_k·(u, s) ≤ 0 for all (u, s): not all rows with λ_k > 0 can be positive (Gordan).
    """
    r, columns = rows.shape
    cost = np.zeros(columns + 1)
    cost[-1] = -1
    bounds = [(-1, 1)] * (columns - 1) + [(0, 1), (None, 1)]
    program = linprog(cost, A_ub=np.column_stack([-rows, np.ones(r)]), b_ub=np.zeros(r), bounds=bounds, method="highs")
    if program.status != 0:
        return None, np.zeros(0, dtype=int)
    if program.x[-1] <= _STRICT:
        return None, np.flatnonzero(program.ineqlin.marginals < -1e-9)
    u, s, gap = program.x[:-2], program.x[-2], program.x[-1]
    # Raising s to ε/2 costs each row at most ε/2: off the horizon, and still inside.
    return np.asarray(u / max(s, gap / 2)), np.zeros(0, dtype=int)


def _solve(rows: np.ndarray, c: np.ndarray, cuts: list[np.ndarray], seconds: float) -> tuple[np.ndarray, float]:
    """The units chosen and an upper bound on their weight. Variables: u (n), s, z (r), face (2n + 1)."""
    r, columns = rows.shape
    n = columns - 1
    faces = 2 * n + 1
    # z_k = 1 requires rows_k·(u, s) ≥ 0; rows are normalized, so that -1 requires nothing.
    on = np.hstack([rows, -np.eye(r), np.zeros((r, faces))])
    # One coordinate of (u, s) is ±1, so that the apex of the cone, where all rows are 0, is out.
    touch = np.zeros((faces, columns + r + faces))
    low = np.full(faces, -1.0)
    for j in range(n):
        touch[2 * j, j], touch[2 * j + 1, j] = 1, -1
        touch[2 * j : 2 * j + 2, columns + r + 2 * j : columns + r + 2 * j + 2] = -2 * np.eye(2)
    touch[-1, n], touch[-1, -1], low[-1] = 1, -1, 0.0
    objective = np.concatenate([np.zeros(columns + r), np.ones(faces)])
    constraints = [
        LinearConstraint(on, -1, np.inf),
        LinearConstraint(touch, low, np.inf),
        LinearConstraint(objective, 1, 1),
    ]
    for cut in cuts:
        line = np.zeros(columns + r + faces)
        line[columns + cut] = 1
        constraints.append(LinearConstraint(line, -np.inf, len(cut) - 1))
    top = np.ones(columns + r + faces)
    if not rows[:, -1].any():
        top[-1] = (
            0  # without biases all rows are 0 at s = 1, u = 0 too: that face is not needed, cones reach the others
        )
    program = milp(
        np.concatenate([np.zeros(columns), -c, np.zeros(faces)]),
        integrality=np.concatenate([np.zeros(columns), np.ones(r + faces)]),
        bounds=Bounds(np.concatenate([-np.ones(n), np.zeros(1 + r + faces)]), top),
        constraints=constraints,
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    total = float(c.sum())
    upper = total if program.mip_dual_bound is None else min(total, -float(program.mip_dual_bound))
    if program.x is None:
        return np.zeros(0, dtype=int), upper
    return np.flatnonzero(program.x[columns : columns + r] > 0.5), upper
