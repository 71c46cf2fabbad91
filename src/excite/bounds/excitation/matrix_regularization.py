"""Regularization as excitation with many outputs: Corollary 3 of Persistency of excitation.

    (a)  min_W Σ ‖y_i − W x_i‖² + λ ‖W‖²,                     ‖W‖ = max ‖W u‖₂ over ‖u‖_p = 1
    (b)  min_W Σ ‖y_i − W(x_i + d_i)‖² + ‖y_i − W(x_i − d_i)‖²,  d_i of p-norm ε with the largest ‖W d‖₂

By the parallelogram law (b) is twice (a) with λ = N ε². This needs the 2-norm of outputs: the corollary's other norms fail.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from excite._core.checks import Norm, check_number, parse_norm
from excite.bounds.bound import Assumption
from excite.bounds.excitation.hard_margin import Array, array
from excite.bounds.excitation.regularization import PAPER, SOLVED, Equivalence
from excite.errors import InputError

STEPS = 20_000


def matrix_equivalence(
    x: Any,
    y: Any,
    *,
    penalty: float | None = None,
    radius: float | None = None,
    norm: object = 2,
    output_norm: object = 2,
) -> Equivalence:
    """Regularization as excitation with many outputs: λ = N ε² and the common solution W (Corollary 3).

        (a)  min_W Σ ‖y_i − W x_i‖² + λ ‖W‖²,                     ‖W‖ = max ‖W u‖₂ over ‖u‖_p = 1
        (b)  min_W Σ ‖y_i − W(x_i + d_i)‖² + ‖y_i − W(x_i − d_i)‖²,  d_i of p-norm ε with the largest ‖W d‖₂

    Both problems are the same function of W, so that one solution is returned for both.

    Args:
        x: Points (N, n).
        y: Targets (N, m).
        penalty: λ; pass either this or ``radius``.
        radius: ε.
        norm: Norm p of the perturbations: 2 (‖W‖ is the largest singular value), 1 (the largest length of a column), or
            "inf", for which the worst perturbation is NP-hard to find and only λ and ε are returned.
        output_norm: Norm of the outputs; the corollary fails for others than 2.

    Returns:
        λ, ε and the solution W (m, n).

    Raises:
        InputError: If shapes do not fit, or not exactly one positive number of ``penalty`` and ``radius`` is passed.

    Example:
        >>> import numpy as np
        >>> from excite.bounds import matrix_equivalence
        >>> both = matrix_equivalence(np.eye(2), np.eye(2), radius=0.5)
        >>> both.penalty, both.holds
        (0.5, True)
    """
    points, targets = array("points", x, 2), array("targets", y, 2)
    if len(points) != len(targets) or not points.size or not targets.size:
        raise InputError(f"expected points (N, n) and targets (N, m); got {points.shape} and {targets.shape}")
    if (penalty is None) == (radius is None):
        raise InputError("matrix_equivalence: expected either penalty or radius")
    if penalty is not None:
        penalty = check_number(penalty, "penalty", 0, 1e30, above=True)
    if radius is not None:
        radius = check_number(radius, "radius", 0, 1e30, above=True)
    p, outputs = parse_norm(norm), parse_norm(output_norm)
    c = penalty if penalty is not None else len(points) * (radius or 0.0) ** 2
    checks = [Assumption("outputs are measured in the 2-norm", outputs == "2", f"norm {outputs}")]
    name, empty = f"Corollary 3, {PAPER}", np.zeros((0, 0))
    if outputs != "2":
        return Equivalence(name, penalty, radius, empty, None, math.inf, tuple(checks))
    if p == "inf":
        checks.append(
            Assumption("the solution is computed", None, "the worst perturbation in the ∞-norm is NP-hard to find")
        )
        return Equivalence(name, c, math.sqrt(c / len(points)), empty, None, math.inf, tuple(checks))
    w, gap = _solve(points, targets, c, p)
    checks.append(Assumption("the problem is solved", gap <= SOLVED, f"duality gap {gap:.1e}"))
    return Equivalence(name, c, math.sqrt(c / len(points)), w, w, 0.0, tuple(checks))


def worst_perturbation(w: Any, radius: float, norm: object = 2) -> Array:
    """The perturbation d (n,) of p-norm ε with the largest ‖W d‖₂: the first right singular vector (p = 2), a coordinate (p = 1).

    Args:
        w: Matrix W (m, n).
        radius: ε.
        norm: p, 2 or 1.

    Returns:
        Array (n,).
    """
    weight, p = array("w", w, 2), parse_norm(norm, ("2", "1"))
    if p == "2":
        return np.asarray(radius * np.linalg.svd(weight)[2][0])
    return np.asarray(radius * np.eye(weight.shape[1])[np.linalg.norm(weight, axis=0).argmax()])


def _split(w: Array, p: Norm) -> tuple[Array, Array, Array]:
    """w as (left * sizes) @ right with ‖w‖ = max sizes: singular values, or the lengths of the columns."""
    if p == "2":
        left, sizes, right = np.linalg.svd(w, full_matrices=False)
        return left, sizes, right
    sizes = np.linalg.norm(w, axis=0)
    return w / np.where(sizes > 0, sizes, 1.0), sizes, np.eye(w.shape[1])


def _shrunk(w: Array, c: float, p: Norm) -> Array:
    """argmin ½‖v − w‖² + c‖v‖²: sizes are cut at the t with Σ (size − t)₊ = 2ct."""
    left, sizes, right = _split(w, p)
    sums = np.cumsum(np.sort(sizes)[::-1])
    t = float((sums / (np.arange(1, len(sizes) + 1) + 2 * c)).max())
    return np.asarray((left * np.minimum(sizes, t)) @ right)


def _solve(x: Array, y: Array, c: float, p: Norm) -> tuple[Array, float]:
    """Accelerated proximal gradient descent with restarts, until the duality gap over ‖y‖² is rounding."""
    step = 1 / (2 * max(float(np.linalg.norm(x, 2)) ** 2, 1e-300))
    w = ahead = best = np.zeros((y.shape[1], x.shape[1]))
    momentum, lowest, total = 1.0, math.inf, max(float((y**2).sum()), 1e-300)
    for _ in range(STEPS):
        new = _shrunk(ahead + step * 2 * (y - x @ ahead.T).T @ x, step * c, p)
        if float(((ahead - new) * (new - w)).sum()) > 0:  # the momentum points uphill: start over
            momentum = 1.0
        faster = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead, w, momentum = new + (momentum - 1) / faster * (new - w), new, faster
        slope = 2 * (y - x @ w.T).T @ x
        # Fenchel and Young: c‖w‖² + ‖slope‖²_* / 4c − ⟨slope, w⟩ bounds the distance to the minimum.
        gap = c * _split(w, p)[1].max() ** 2 + _split(slope, p)[1].sum() ** 2 / (4 * c) - float((slope * w).sum())
        if gap / total < lowest:
            best, lowest = w, max(0.0, float(gap) / total)
        if lowest < 1e-15:
            break
    return best, lowest
