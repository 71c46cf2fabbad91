"""The first layer's own constant from how the second layer is trained: Lemma 6, corrected.

Let f₁(x) = (W₁x + b₁)₊. For plain SGD on one sample, ∂ℓ/∂W₂ = ∂ℓ/∂b₂ f₁(x)', so ‖ΔW₂‖₂ / ‖Δb₂‖ = ‖f₁(x)‖: the paper divides
by the update of the first bias, which says nothing about f₁. With G = max ‖(W₁x)₊‖ over unit vectors x:

- ‖(W₁x)₊‖ ≤ ‖f₁(x)‖ + ‖b₁‖, and a later W₁ adds at most β for unit x;
- (W₁x*)₊ ≤ (W₁x)₊ + (W₁(x* − x))₊ entry by entry, so G ≤ max over training points + δ G if they cover the unit sphere;
- the Lipschitz constant of f₁ is at most ‖W₁‖₂, and for its top singular vector v ‖W₁v‖² = ‖(W₁v)₊‖² + ‖(−W₁v)₊‖² ≤ 2G².

The paper equates G and the Lipschitz constant: the factor √2 is missing there. Assumption 1 is not needed.
"""

from __future__ import annotations

import math

from excite.bounds.bound import Assumption, Bound
from excite.bounds.steady import PAPER, Numbers, numbers
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
) -> Bound:
    """‖W₁‖₂ ≤ √2 (ϑ + β)/(1 − δ), with ϑ the largest ‖ΔW₂‖₂/‖Δb₂‖ + ‖b₁‖ over steps that see every training point.

    Args:
        weight_updates, bias_updates, biases: ‖ΔW₂‖₂, ‖Δb₂‖ and ‖b₁‖, one a step; steps without an update are left out.
        beta: the largest ‖W₁ᵗ − W₁ˢ‖₂ between any two steps.
        delta: every unit vector is within δ < 1 of a training point.
        unit: whether all training inputs have norm one.
    """
    weight = numbers("weight_updates", weight_updates)
    bias, offset = (numbers(n, v, len(weight)) for n, v in (("bias_updates", bias_updates), ("biases", biases)))
    if beta < 0 or delta < 0:
        raise InputError(f"expected beta and delta of at least 0; got {beta} and {delta}")
    kept = bias > 0
    theta = float((weight[kept] / bias[kept] + offset[kept]).max()) if kept.any() else math.nan
    gain = (theta + beta) / (1 - delta) if delta < 1 else math.inf
    return Bound(
        f"Lemma 6, {PAPER}, second bias and √2",
        "Lipschitz constant of the first layer",
        math.sqrt(2) * gain,
        "upper",
        {"theta": theta, "beta": beta, "delta": delta, "gain": gain, "steps": int(kept.sum())},
        (
            Assumption("plain SGD, one sample a step, ReLU after the first layer", sgd),
            Assumption("inputs have norm one", unit),
            Assumption("training points cover the unit sphere with δ < 1", delta < 1, f"δ = {delta:.3g}"),
            Assumption("every training point is drawn in these steps", None),
        ),
    )
