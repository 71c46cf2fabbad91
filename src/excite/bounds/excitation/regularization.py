"""Regularization as excitation: Theorem 6 and Corollary 3 of Persistency of excitation.

    (a)  min_w Σ (y_i − w·x_i)² + λ ‖w‖_p^m
    (b)  min_w Σ ½(y_i − min w·(x_i + d))² + ½(y_i − max w·(x_i + d))²  over ‖d‖_q ≤ ε

(b) is Σ (y_i − w·x_i)² + N ε² ‖w‖_p² with N points. Both have the same solutions where λ = (2Nε²/m) ‖w‖_p^(2−m) at w ≠ 0.
Losses are sums, as in the paper. Solutions need not be unique for p in 1, ∞: Xw and ‖w‖_p are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from excite._core.checks import DUAL, Norm, check_number, parse_norm
from excite.bounds.bound import Assumption, Statement
from excite.bounds.excitation.hard_margin import Array, array
from excite.bounds.excitation.penalized import duality_gap, penalized, penalized_squared, size
from excite.errors import InputError

PAPER = "Persistency of excitation"
SOLVED = 1e-10  # largest duality gap, over ‖y‖²
SAME = 1e-6  # largest difference of Xw and of ‖w‖, relative


@dataclass(frozen=True)
class Equivalence(Statement):
    """A penalty λ and a radius ε with the same solution, and the solution of each problem, found separately.

    Args:
        name: Theorem and paper.
        penalty: λ; None where there is none.
        radius: ε; None where there is none.
        regularized: Solution of the penalized problem.
        excited: Solution of the problem with excited inputs.
        difference: The larger of ‖Xw − Xw'‖/‖y‖ and |‖w‖ − ‖w'‖| / ‖w‖ of the two solutions.
        assumptions: The conditions of the theorem.

    Example:
        >>> from excite.bounds import radius_of_penalty
        >>> both = radius_of_penalty([[1.0, 0.0], [0.0, 2.0]], [1.0, 1.0], penalty=2.0)
        >>> both.difference < 1e-6
        True
    """

    name: str
    penalty: float | None  # λ
    radius: float | None  # ε
    regularized: Array  # solution of (a)
    excited: Array | None  # solution of (b)
    difference: float  # of the two: the larger of ‖Xw − Xw'‖/‖y‖ and |‖w‖ − ‖w'‖| / ‖w‖
    assumptions: tuple[Assumption, ...] = ()

    def __str__(self) -> str:
        none = None in (self.penalty, self.radius)
        return self.describe("no equivalent" if none else f"λ = {self.penalty:.6g}, ε = {self.radius:.6g}")


def radius_of_penalty(x: Any, y: Any, penalty: float, norm: object = 2, power: float = 2.0) -> Equivalence:
    """The radius ε of excitation with the same solution as a penalty λ: ε = √(λ m ‖w‖^(m−2) / 2N) (Theorem 6).

        (a)  min_w Σ (y_i − w·x_i)² + λ ‖w‖_p^m
        (b)  min_w Σ ½(y_i − min w·(x_i + d))² + ½(y_i − max w·(x_i + d))²  over ‖d‖_q ≤ ε

    There is no such radius for m = 1 and λ ≥ 2‖X'y‖_q, where (a) gives zero and (b) never does. Losses are sums over points.

    Args:
        x: Points (N, n).
        y: Targets (N,).
        penalty: λ > 0.
        norm: The p of ‖w‖_p: 1, 2 or "inf"; perturbations are measured in the dual norm q.
        power: m ≥ 1.

    Returns:
        λ, ε and both solutions.

    Raises:
        InputError: If shapes do not fit or a number is out of range.

    Example:
        >>> from excite.bounds import radius_of_penalty
        >>> both = radius_of_penalty([[1.0, 0.0], [0.0, 2.0]], [1.0, 1.0], penalty=2.0)
        >>> both.radius, both.holds  # ridge: λ = N ε²
        (1.0, True)
    """
    points, targets, p = _checked(x, y, penalty, "penalty", norm, power)
    w = penalized(points, targets, penalty, p, power)
    largest = 2 * size(points.T @ targets, DUAL[p])
    length = size(w, p)
    nonzero = Assumption(
        "the penalty does not give zero where excitation does not",
        length > 0 or largest == 0,
        f"λ = {penalty:.6g}, m = {power:g}, 2‖X'y‖_q = {largest:.6g}",
    )
    if not nonzero.held:
        return Equivalence(f"Theorem 6, {PAPER}", penalty, None, w, None, math.inf, (nonzero,))
    # With X'y = 0 both solutions are zero for every λ and ε.
    radius = math.sqrt(penalty * power * length ** (power - 2) / (2 * len(points)) if length else penalty / len(points))
    v = penalized_squared(points, targets, len(points) * radius**2, p)
    return _Problems(points, targets, p, power).compared(penalty, radius, w, v, (nonzero,))


def penalty_of_radius(x: Any, y: Any, radius: float, norm: object = 2, power: float = 2.0) -> Equivalence:
    """The penalty λ with the same solution as excitation of radius ε: λ = (2Nε²/m) ‖w‖_p^(2−m) (Theorem 6).

    The two problems are those of `radius_of_penalty`.

    Args:
        x: Points (N, n).
        y: Targets (N,).
        radius: ε > 0.
        norm: The p of ‖w‖_p: 1, 2 or "inf"; perturbations are measured in the dual norm q.
        power: m ≥ 1.

    Returns:
        λ, ε and both solutions.

    Raises:
        InputError: If shapes do not fit or a number is out of range.

    Example:
        >>> from excite.bounds import penalty_of_radius
        >>> penalty_of_radius([[1.0, 0.0], [0.0, 2.0]], [1.0, 1.0], radius=1.0).penalty
        2.0
    """
    points, targets, p = _checked(x, y, radius, "radius", norm, power)
    v = penalized_squared(points, targets, len(points) * radius**2, p)
    length = size(v, p)
    penalty = 2 * len(points) * radius**2 / power * (length ** (2 - power) if length else 1.0)
    w = penalized(points, targets, penalty, p, power)
    return _Problems(points, targets, p, power).compared(penalty, radius, w, v)


def excited_loss(x: Any, y: Any, w: Any, radius: float, norm: object = 2) -> float:
    """The objective (b) at w, written out: the two extremes of w·(x_i + d) over ‖d‖_q ≤ ε, q dual to `norm`."""
    points, targets, p = _checked(x, y, radius, "radius", norm, 2.0)
    weight = array("w", w, 1)
    max_change = radius * size(weight, p)
    middle = points @ weight
    return float((0.5 * (targets - middle + max_change) ** 2 + 0.5 * (targets - middle - max_change) ** 2).sum())


@dataclass(frozen=True)
class _Problems:
    """The penalized problem and the excited one on the same data."""

    x: Array
    y: Array
    norm: Norm
    power: float

    def compared(
        self, penalty: float, radius: float, w: Array, v: Array, before: tuple[Assumption, ...] = ()
    ) -> Equivalence:
        """The solutions w of the penalized and v of the excited problem side by side."""
        x, y, p = self.x, self.y, self.norm
        gaps = duality_gap(x, y, w, penalty, p, self.power), duality_gap(x, y, v, len(x) * radius**2, p, 2.0)
        outputs = float(np.linalg.norm(x @ (w - v))) / max(float(np.linalg.norm(y)), 1e-300)
        shortest = 1e-12 * float(np.linalg.norm(y)) / max(float(np.linalg.norm(x)), 1e-300)  # below: rounding
        lengths = abs(size(w, p) - size(v, p)) / max(size(w, p), shortest, 1e-300)
        difference = max(outputs, lengths)
        solved = f"duality gaps {gaps[0]:.1e} and {gaps[1]:.1e}"
        checks = (
            *before,
            Assumption("both problems are solved", max(gaps) <= SOLVED, solved),
            Assumption("the solutions agree in Xw and ‖w‖", difference <= SAME, f"difference {difference:.1e}"),
        )
        return Equivalence(f"Theorem 6, {PAPER}", penalty, radius, w, v, difference, checks)


def _checked(x: Any, y: Any, number: float, what: str, norm: object, power: float) -> tuple[Array, Array, Norm]:
    points, targets = array("points", x, 2), array("targets", y, 1)
    if len(points) != len(targets) or not points.size:
        raise InputError(f"expected points (N, n) and targets (N,); got {points.shape} and {targets.shape}")
    check_number(number, what, 0, 1e100, above=True)  # its square must not overflow
    check_number(power, "power", 1, 100)
    return points, targets, parse_norm(norm)
