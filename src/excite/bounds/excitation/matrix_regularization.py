"""Regularization as excitation with many outputs: Corollary 3 of Persistency of excitation.

    (a)  min_W Σ ‖y_i − W x_i‖² + λ ‖W‖²,                     ‖W‖ = max ‖W u‖₂ over ‖u‖_p = 1
    (b)  min_W Σ ‖y_i − W(x_i + d_i)‖² + ‖y_i − W(x_i − d_i)‖²,  d_i of p-norm ε with the largest ‖W d‖₂

By the parallelogram law (b) is twice (a) with λ = N ε². This needs the 2-norm of outputs: the corollary's other norms fail. The two
are solved separately: (a) by proximal gradient descent on W, (b) as a game between W and a distribution of perturbations. For p = ∞ the worst perturbations are
corners of a cube, 2^(n − 1) up to their sign: both are solved for few inputs, (a) with the corners as constraints.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from scipy import optimize

from excite._core.checks import Norm, check_number, parse_norm
from excite.bounds.bound import Assumption
from excite.bounds.excitation.hard_margin import Array, array
from excite.bounds.excitation.regularization import PAPER, SAME, SOLVED, Equivalence
from excite.errors import InputError

STEPS = 20_000
RESTARTS = 20  # of the search for the worst distribution of perturbations
STRONG = 100.0  # λ over ‖X‖² above which a penalty leaves little to gain
CORNERS = 10  # inputs up to which all corners of the cube are tried
PLAYED = 1e-6  # largest duality gap of the game, over what W gains


def matrix_equivalence(
    x: Any,
    y: Any,
    *,
    penalty: float | None = None,
    radius: float | None = None,
    norm: object = 2,
    output_norm: object = 2,
) -> Equivalence:
    """Regularization as excitation with many outputs: λ = N ε² and the solutions W of both problems (Corollary 3).

        (a)  min_W Σ ‖y_i − W x_i‖² + λ ‖W‖²,                     ‖W‖ = max ‖W u‖₂ over ‖u‖_p = 1
        (b)  min_W Σ ‖y_i − W(x_i + d_i)‖² + ‖y_i − W(x_i − d_i)‖²,  d_i of p-norm ε with the largest ‖W d‖₂

    The problems are solved separately, and the difference of the solutions in XW' and ‖W‖ is reported.

    Args:
        x: Points (N, n).
        y: Targets (N, m).
        penalty: λ; pass either this or ``radius``.
        radius: ε.
        norm: Norm p of the perturbations: 2 (‖W‖ is the largest singular value), 1 (the largest length of a column), or
            "inf" (the largest ‖W s‖₂ over signs s), which is NP-hard to find: for more than ten inputs only λ and ε are returned.
        output_norm: Norm of the outputs; the corollary fails for others than 2.

    Returns:
        λ, ε, both solutions W (m, n) and their difference.

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
    if p == "inf" and points.shape[1] > CORNERS:
        reason = (
            f"the worst perturbation in the ∞-norm is NP-hard to find; up to {CORNERS} inputs all corners are tried"
        )
        checks.append(Assumption("the solution is computed", None, reason))
        return Equivalence(name, c, math.sqrt(c / len(points)), empty, None, math.inf, tuple(checks))
    return _both_solutions(name, points, targets, c, p, tuple(checks))


def _both_solutions(
    name: str, points: Array, targets: Array, c: float, p: Norm, checks: tuple[Assumption, ...]
) -> Equivalence:
    """Solves both problems at λ = c, and compares."""
    max_norm = math.sqrt(c / len(points))
    (w, gap), (v, game) = _solve(points, targets, c, p), _play(points, targets, max_norm, p)
    difference = _difference(points, targets, w, v, p)
    solved = f"duality gaps {gap:.1e} and {game:.1e}"
    # What W gains; a gap that is not far below it leaves the solution open, as where the step limit was reached.
    gained = max(float((targets * (points @ w.T)).sum()), 1e-300)
    total = float((targets**2).sum())
    exact = PLAYED * gained if p == "inf" else min(SOLVED * total, 1e-13 * gained)  # corners: by a general solver
    both = gap * total <= exact and game <= PLAYED
    agree = difference <= SAME if both else None
    result = (
        Assumption("both problems are solved", both, solved),
        Assumption("the solutions agree in XW' and ‖W‖", agree, f"difference {difference:.1e}"),
    )
    return Equivalence(name, c, max_norm, w, v, difference, (*checks, *result))


def worst_perturbation(w: Any, radius: float, norm: object = 2) -> Array:
    """The perturbation d (n,) of p-norm ε with the largest ‖W d‖₂: the first right singular vector (p = 2), a coordinate (p = 1), signs (p = ∞).

    Args:
        w: Matrix W (m, n).
        radius: ε.
        norm: p, 2, 1 or "inf", the last for at most ten inputs.

    Returns:
        Array (n,).
    """
    weight, p = array("w", w, 2), parse_norm(norm)
    if p == "inf":
        return np.asarray(
            radius * (signs := _corners(weight.shape[1]))[np.linalg.norm(weight @ signs.T, axis=0).argmax()]
        )
    if p == "2":
        return np.asarray(radius * np.linalg.svd(weight)[2][0])
    return np.asarray(radius * np.eye(weight.shape[1])[np.linalg.norm(weight, axis=0).argmax()])


def _corners(n: int) -> Array:
    """Corners of the cube [−1, 1]^n up to their sign, (2^(n − 1), n)."""
    if n > CORNERS:
        raise InputError(f"norm 'inf': expected at most {CORNERS} inputs, whose corners are all tried; got {n}")
    return np.array(list(itertools.product((1.0,), *[(1.0, -1.0)] * (n - 1)))).reshape(-1, n)


def _norm(w: Array, p: Norm) -> float:
    """‖W‖, the largest ‖W u‖₂ over ‖u‖_p = 1."""
    return float((np.linalg.norm(w @ _corners(w.shape[1]).T, axis=0) if p == "inf" else _split(w, p)[1]).max())


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
    if p == "inf":
        return _solve_corners(x, y, c)
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
        # Under a strong penalty W gains little of ‖y‖²; then the gap is compared with that.
        gained = float((slope * w).sum()) / (2 * total) if 2 * step * c > STRONG else 1.0
        if lowest < 1e-15 * min(1.0, max(gained, 1e-15)):
            break
    return best, lowest


def _solve_corners(x: Array, y: Array, c: float) -> tuple[Array, float]:
    """min Σ ‖y − W x‖² + c t with ‖W s‖² ≤ t at the corners s, by sequential quadratic programming; and the duality gap over ‖y‖²."""
    total = max(float((y**2).sum()), 1e-300)
    shape, signs, gram, pull = (y.shape[1], x.shape[1]), _corners(x.shape[1]), x.T @ x, y.T @ x

    def ridge(weights: Array) -> Array:
        return np.asarray(np.linalg.lstsq(gram + c * (signs.T * weights) @ signs, pull.T, rcond=None)[0].T)

    def value(w: Array) -> float:
        return (float(((y - x @ w.T) ** 2).sum()) + c * _norm(w, "inf") ** 2) / total

    start = ridge(np.full(len(signs), 1 / len(signs)))
    unit = max(_norm(start, "inf"), 1e-300)

    def objective(z: Array) -> tuple[float, Array]:
        w, t = unit * z[:-1].reshape(shape), unit**2 * z[-1]
        slope = 2 * unit * (w @ gram - pull) / total
        return (float(((y - x @ w.T) ** 2).sum()) + c * t) / total, np.append(slope.ravel(), c * unit**2 / total)

    def slack(z: Array) -> Array:
        return np.asarray(z[-1] - ((z[:-1].reshape(shape) @ signs.T) ** 2).sum(0))

    def slack_slope(z: Array) -> Array:
        moved = -2 * np.einsum("mk,kn->kmn", z[:-1].reshape(shape) @ signs.T, signs).reshape(len(signs), -1)
        return np.hstack([moved, np.ones((len(signs), 1))])

    limits = {"type": "ineq", "fun": slack, "jac": slack_slope}
    begin = np.append(start.ravel() / unit, 1.0)
    solution = optimize.minimize(
        objective, begin, jac=True, method="SLSQP", constraints=[limits], options={"ftol": 1e-16, "maxiter": 1000}
    ).x
    w = unit * solution[:-1].reshape(shape)
    # A distribution over corners for which W is the ridge solution gives a lower bound.
    forces = np.stack([np.outer(w @ sign, sign).ravel() for sign in signs], 1) * c
    scale = max(float(np.abs(pull).max()), 1e-300)
    rows = np.vstack([forces / scale, np.ones(len(signs))])
    weights = optimize.nnls(rows, np.append((pull - w @ gram).ravel() / scale, 1.0))[0]
    weights = weights / max(float(weights.sum()), 1e-300)
    best = ridge(weights)
    lower = 1 - float((pull * best).sum()) / total
    return w, max(0.0, value(w) - lower)


def _difference(x: Array, y: Array, w: Array, v: Array, p: Norm) -> float:
    """The larger of ‖X(W − V)'‖/‖Y‖ and |‖W‖ − ‖V‖| / ‖W‖."""
    total = max(float(np.linalg.norm(y)), 1e-300)
    sizes = [_norm(result, p) for result in (w, v)]
    shortest = 1e-12 * total / max(float(np.linalg.norm(x)), 1e-300)  # below: rounding
    return max(float(np.linalg.norm(x @ (w - v).T)) / total, abs(sizes[0] - sizes[1]) / max(sizes[0], shortest, 1e-300))


def _play(x: Array, y: Array, radius: float, p: Norm) -> tuple[Array, float]:
    """Half of (b) as a game: max over distributions of perturbations d of min over W of Σ E ‖y_i − W(x_i ± d)‖².

    Against a distribution with E dd' = ε² B'B the best W is a ridge regression with the rows √N ε B as further points. B is found by
    L-BFGS: any of Frobenius norm 1 (p = 2), a diagonal one (p = 1), corners with weights (p = ∞). What the worst single d gains over the distribution is the duality gap.
    """
    if p == "2":  # a part of W outside of the span of the points changes nothing but its norm
        _, sizes, right = np.linalg.svd(x, full_matrices=False)
        span = right[sizes > 1e-12 * max(float(sizes.max()), 1e-300)]
    else:
        span = np.eye(x.shape[1])
    points, n, scale = x @ span.T, len(span), math.sqrt(len(x)) * radius
    if not n:
        return np.zeros((y.shape[1], x.shape[1])), 0.0

    rows = _corners(n) if p == "inf" else np.eye(n)

    def respond(a: Array) -> tuple[Array, Array]:
        b = (a.reshape(n, n) if p == "2" else a[:, None] * rows) / np.linalg.norm(a)
        ghosts = np.vstack([points, scale * b]), np.vstack([y, np.zeros((len(b), y.shape[1]))])
        return b, np.linalg.lstsq(*ghosts, rcond=None)[0].T

    # The minimum over W is ‖Y‖² − ⟨Y'X, W⟩: the perturbations make ⟨Y'X, W⟩ small. Relative to its first value, for any ε.
    pull = y.T @ points
    _, sizes, right = _split(pull, "1" if p == "inf" else p)
    start = (right.T * np.sqrt(sizes / max(float(sizes.max()), 1e-300))) @ right + 1e-2 * np.eye(
        n
    )  # best for a large ε
    a = start.ravel() if p == "2" else np.diag(start).copy() if p == "1" else np.ones(len(rows))
    first = max(float((pull * respond(a)[1]).sum()), 1e-300)

    def gain(a: Array) -> tuple[float, Array]:
        b, w = respond(a)
        slope = 2 * scale**2 * b @ (w.T @ w) / first
        slope = slope.ravel() if p == "2" else (slope * rows).sum(1)
        unit = a / np.linalg.norm(a)
        return float((pull * w).sum()) / first, -(slope - unit * (slope @ unit)) / np.linalg.norm(a)

    best, smallest_gap = np.zeros((y.shape[1], n)), math.inf
    options = {"maxiter": 5000, "maxfun": 20_000, "ftol": 1e-17, "gtol": 1e-14, "maxcor": 30}
    for _ in range(RESTARTS):
        result = optimize.minimize(gain, a, jac=True, method="L-BFGS-B", options=options).x
        a = result / np.linalg.norm(result)
        w = respond(a)[1]
        gap = float(((points @ w.T) ** 2).sum() + (scale * _norm(w, p)) ** 2 - (pull * w).sum())
        if gap < smallest_gap:
            best, smallest_gap = w, max(0.0, gap)
        if smallest_gap < 1e-11 * first:
            break
    return np.asarray(best @ span), smallest_gap / first
