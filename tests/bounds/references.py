"""Slow and obvious: enumeration where the code solves programs."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np


def least_norm_by_enumeration(rows: np.ndarray) -> np.ndarray:
    """argmin ‖z‖ with rows @ z ≥ 1: some set of constraints is active, and z is their solution of least norm."""
    best = None
    for size in range(1, min(len(rows), rows.shape[1]) + 1):
        for active in combinations(range(len(rows)), size):
            z = np.linalg.pinv(rows[list(active)]) @ np.ones(size)
            if (rows @ z >= 1 - 1e-9).all() and (best is None or z @ z < best @ best):
                best = z
    return best


def optimal_margin_by_enumeration(x: np.ndarray, y: np.ndarray) -> float:
    """Half the distance of the hulls of two classes in the plane: of a point or an edge to a point of the other."""

    def to_segment(p, a, b):
        t = np.clip((p - a) @ (b - a) / max((b - a) @ (b - a), 1e-300), 0, 1)
        return np.linalg.norm(p - a - t * (b - a))

    one, two = x[y == 1], x[y == 0]
    return (
        min(
            to_segment(p, a, b)
            for these, those in ((one, two), (two, one))
            for p in these
            for a in those
            for b in those
        )
        / 2
    )


def lipschitz_by_enumeration(v: np.ndarray, b: np.ndarray, w: np.ndarray) -> float:
    """max ‖Σ_active w_k V_k‖ over the linear pieces of w·(Vx + b)₊: every piece has a corner, where n kinks meet."""
    _, sizes, rows = np.linalg.svd(v, full_matrices=False)
    v = v @ rows[sizes > 1e-12 * sizes[0]].T  # only the directions that the units see
    alive = np.linalg.norm(v, axis=1) > 0
    v, b, w = v[alive], b[alive], w[alive]
    n, best = v.shape[1], 0.0
    pieces = np.array(list(product([0.0, 1.0], repeat=n)))
    for chosen in map(list, combinations(range(len(v)), n)):
        try:
            corner = np.linalg.solve(v[chosen], -b[chosen])
        except np.linalg.LinAlgError:
            continue
        on = np.tile((v @ corner + b > 0).astype(float), (len(pieces), 1))
        on[:, chosen] = pieces
        best = max(best, float(np.linalg.norm((on * w) @ v, axis=1).max()))
    return best
