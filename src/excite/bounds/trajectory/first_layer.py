"""The first layer's own constant from how the second layer is trained: Lemma 6, corrected.

Let f₁(x) = (W₁x + b₁)₊. For plain SGD on one sample, ∂ℓ/∂W₂ = ∂ℓ/∂b₂ f₁(x)', so ‖ΔW₂‖₂ / ‖Δb₂‖ = ‖f₁(x)‖: the paper divides
by the update of the first bias, which says nothing about f₁. With G = max ‖(W₁x)₊‖ over unit vectors x:

- ‖(W₁x)₊‖ ≤ ‖f₁(x)‖ + ‖b₁‖, and a later W₁ adds at most β for unit x;
- (W₁x*)₊ ≤ (W₁x)₊ + (W₁(x* − x))₊ entry by entry, so G ≤ max over training points + δ G if they cover the unit sphere;
- the Lipschitz constant of f₁ is at most ‖W₁‖₂, and for its top singular vector v ‖W₁v‖² = ‖(W₁v)₊‖² + ‖(−W₁v)₊‖² ≤ 2G².

The paper equates G and the Lipschitz constant: the factor √2 is missing there. Assumption 1 is not needed.

The maximum is over training points whose f₁(x) is known, those with a step at which Δb₂ ≠ 0. A point at which the second layer is
dead, or the loss has no gradient, never moves b₂ and says nothing about f₁ there: the points that cover the sphere must each
have such a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from excite._core.checks import check_count, check_maybe, check_number
from excite.bounds.bound import Assumption, Bound
from excite.bounds.trajectory.steady import PAPER, Floats, Numbers, numbers
from excite.errors import InputError


def first_layer_lipschitz(
    weight_updates: Numbers,
    bias_updates: Numbers,
    biases: Numbers,
    beta: float,
    delta: float,
    *,
    unit: bool | None = None,
    sgd: bool | None = None,
    drawn: Sequence[int] | Tensor | None = None,
    points: int | None = None,
) -> Bound:
    """Lipschitz constant of the first layer from how the second is trained: ‖W₁‖₂ ≤ √2 (ϑ + β)/(1 − δ) (Lemma 6, corrected).

    ϑ is the largest ‖ΔW₂‖₂/‖Δb₂‖ + ‖b₁‖ over steps of plain SGD in which every training point moved b₂.

    Args:
        weight_updates: ‖ΔW₂‖₂, one per step.
        bias_updates: ‖Δb₂‖, one per step. Steps with Δb₂ = 0 say nothing.
        biases: ‖b₁‖, one per step.
        beta: Largest ‖W₁ᵗ − W₁ˢ‖₂ between any two steps.
        delta: Every unit vector is within δ < 1 of a training point.
        unit: Whether all training inputs have norm one; None if unknown.
        sgd: Whether the run was plain SGD on one sample per step with a ReLU after the first layer; None if unknown.
        drawn: Index of the training point, 0 to ``points`` − 1, that each step was taken on; needed as soon as one step has
            Δb₂ = 0. Number only the points that cover the sphere, and leave out the steps of others.
        points: Number of training points; needed with ``drawn``.

    Returns:
        An upper bound. ``terms["unmoved"]`` lists the points without a step at which Δb₂ ≠ 0; if there are any, the bound says
        nothing: pass δ and steps for the others alone.

    Raises:
        InputError: If lengths differ, or numbers are negative or not finite.

    Example:
        >>> from excite.bounds import first_layer_lipschitz
        >>> bound = first_layer_lipschitz([0.2, 0.1], [0.1, 0.1], [0.0, 0.0], beta=0.0, delta=0.5, drawn=[0, 1], points=2)
        >>> round(bound.value, 3)
        5.657
    """
    weight = numbers("weight_updates", weight_updates)
    bias, offset = (numbers(n, v, len(weight)) for n, v in (("bias_updates", bias_updates), ("biases", biases)))
    beta, delta = check_number(beta, "beta", 0), check_number(delta, "delta", 0)
    unit, sgd = check_maybe(unit, "unit"), check_maybe(sgd, "sgd")
    used = bias > 0
    moved, unmoved = _moved(bias, drawn, points)
    theta = float((weight[used] / bias[used] + offset[used]).max()) if used.any() else math.nan
    gain = (theta + beta) / (1 - delta) if delta < 1 else math.inf
    terms = {"theta": theta, "beta": beta, "delta": delta, "gain": gain, "steps": int(used.sum()), "unmoved": unmoved}
    checks = (
        Assumption("plain SGD, one sample a step, ReLU after the first layer", sgd),
        Assumption("inputs have norm one", unit),
        Assumption("training points cover the unit sphere with δ < 1", delta < 1, f"δ = {delta:.3g}"),
        moved,
    )
    name, quantity = f"Lemma 6, {PAPER}, second bias and √2", "Lipschitz constant of the first layer"
    return Bound(name, quantity, math.sqrt(2) * gain, "upper", terms, checks)


def _moved(
    bias: Floats, drawn: Sequence[int] | Tensor | None, points: int | None
) -> tuple[Assumption, tuple[int, ...]]:
    """Whether every training point has a step at which Δb₂ ≠ 0; and those that have none."""
    text = "every training point is drawn at a step at which the second bias moves"
    still = int((bias == 0).sum())
    if drawn is None:
        # Without a step left out it is enough that every point is drawn; of a step left out the point may have no other.
        detail = (
            f"Δb₂ = 0 at {still} of {len(bias)} steps: say with drawn= and points= of which points" if still else ""
        )
        return Assumption(text, False if still else None, detail), ()
    if points is None:
        raise InputError("points: expected the number of training points with drawn=; got None")
    points = check_count(points, "points")
    drawn_rows = np.asarray(drawn.detach().cpu() if isinstance(drawn, Tensor) else drawn)
    if (
        drawn_rows.shape != bias.shape
        or drawn_rows.dtype.kind not in "iu"
        or drawn_rows.min() < 0
        or drawn_rows.max() >= points
    ):
        raise InputError(f"drawn: expected {len(bias)} whole numbers from 0 to {points - 1}, one per step")
    unmoved = tuple(int(i) for i in np.setdiff1d(np.arange(points), drawn_rows[bias > 0]))
    shown = ", ".join(map(str, unmoved[:8])) + (", …" if len(unmoved) > 8 else "")
    return Assumption(text, not unmoved, f"{len(unmoved)} of {points} never do: {shown}" if unmoved else ""), unmoved
