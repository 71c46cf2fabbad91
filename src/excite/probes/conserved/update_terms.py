"""Change of a conserved number by an optimizer's step, term by term.

With w before the step, g the gradient that the optimizer sees, and S(a, b) the signed sum of a·b over a law (producers
minus consumers), an update w → w + Δ changes the law by 2 S(w, Δ) + S(Δ, Δ). The update is built up in stages,

    −η g  →  −η (g + d)  →  momentum in place of g  →  divided by the root of the second moment,

and each stage is charged with the change it makes. d is λ w, or what decay has in the momentum buffer. A gradient obeys S(w, g) = 0, so the first stage leaves
η² S(g, g): appendix F. Where learning rates differ within a law, −2 S((η − η̄) w, g) is the part `rates`. Optimizers that
divide first and keep momentum of the quotient (RMSprop) have the last two stages in that order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

PARTS = ("step", "rates", "decay", "momentum", "rescaling", "eps", "update")
UpdateRule = Literal["sgd", "adam", "rmsprop", "adagrad", "measured"]
_RULES: dict[type[torch.optim.Optimizer], UpdateRule] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adam",
    torch.optim.RMSprop: "rmsprop",
    torch.optim.Adagrad: "adagrad",
}


def rule_of(optimizer: torch.optim.Optimizer) -> UpdateRule:
    """Which formula predicts the optimizer's update from the gradient.

    "measured" where Excite has none: then the update is measured, and the laws are not checked.
    """
    return _RULES.get(type(optimizer), "measured")


Form = dict[
    str, float
]  # what is summed over a law: coefficients of products, "wg" for w·g before the step, "aa" for w·w after it


def plain(rate: float) -> Form:
    """Change of a law under −η g."""
    return {"wg": -2 * rate, "gg": rate * rate}


def decayed(rate: float, decay: float) -> Form:
    """The term of weight decay outside momentum: coupled or decoupled, the update is −η (g + λ w)."""
    return {"ww": rate * decay * (rate * decay - 2), "wg": 2 * rate * rate * decay}


def decayed_by(rate: float, correction: float) -> Form:
    """The term of decay when the update is −η (g + d / c)."""
    rate, root = rate / correction, rate
    return {"wd": -2 * rate, "gd": 2 * rate * root, "dd": rate * rate}


def moved(rate: float, shrink: float, correction: float, direction: str) -> Form:
    """Change of a law under −η (u / c + s w)."""
    own = rate * shrink
    return {
        "ww": own * (own - 2),
        f"w{direction}": 2 * rate / correction * (own - 1),
        direction * 2: (rate / correction) ** 2,
    }


def less(form: Form, *others: Form) -> Form:
    """The difference of forms."""
    result = dict(form)
    for other in others:
        for name, value in other.items():
            result[name] = result.get(name, 0.0) - value
    return result


def direction_of_sgd(
    states: Sequence[Mapping[str, Any]],
    settings: Sequence[Mapping[str, Any]],
    before: Sequence[Tensor],
    grads: Sequence[Tensor],
) -> list[Tensor]:
    """u with Δ = −η u, read from the state after the step; `grads` as they were before it."""
    result = []
    for state, setting, w, g in zip(states, settings, before, grads):
        buffer = state.get("momentum_buffer")
        if buffer is not None and setting["momentum"] and not setting["nesterov"]:
            result.append(buffer)
            continue
        if setting["weight_decay"]:
            g = g.add(w, alpha=setting["weight_decay"])
        result.append(g if buffer is None or not setting["momentum"] else g.add(buffer, alpha=setting["momentum"]))
    return result


@dataclass(frozen=True)
class OptimizerMoments:
    """Adam's moments by parameter, and what its update divides them by: m̂ = m / correction, √v̂ = √v / root."""

    first: list[Tensor]
    second: list[Tensor]
    correction: list[float]  # 1 − β₁ᵗ
    root: list[float]  # √(1 − β₂ᵗ)
    eps: list[float]

    def scaled(self) -> list[Tensor]:
        """m / (√v̂ + ε)."""
        below = list(torch._foreach_sqrt(self.second))
        torch._foreach_div_(below, self.root)
        torch._foreach_add_(below, self.eps)
        return list(torch._foreach_div(self.first, below))


def moments_of_adam(
    states: Sequence[Mapping[str, Any]],
    settings: Sequence[Mapping[str, Any]],
    like: Sequence[Tensor],
    counts: Sequence[float],
) -> OptimizerMoments:
    """`counts`: the steps that each parameter has made."""
    moments = OptimizerMoments([], [], [], [], [])
    for state, setting, w, steps in zip(states, settings, like, counts):
        # Without a state it never had a gradient, and does not move.
        moments.first.append(state["exp_avg"] if state else torch.zeros_like(w))
        moments.second.append(
            state["max_exp_avg_sq" if setting["amsgrad"] else "exp_avg_sq"] if state else torch.ones_like(w)
        )
        moments.correction.append(1 - setting["betas"][0] ** steps)
        moments.root.append((1 - setting["betas"][1] ** steps) ** 0.5)
        moments.eps.append(float(setting["eps"]))
    return moments


@dataclass(frozen=True)
class Quotients:
    """Update −η u / correction of RMSprop and Adagrad.

    u is the decayed gradient over the root of the second moment, `scaled`, or momentum of it.
    """

    scaled: list[Tensor]
    momentum: list[Tensor] | None
    correction: list[float]


def quotients(
    states: Sequence[Mapping[str, Any]],
    settings: Sequence[Mapping[str, Any]],
    before: Sequence[Tensor],
    grads: Sequence[Tensor],
    counts: Sequence[float],
) -> Quotients:
    """From the state after the step; `grads` as they were before it."""
    result = Quotients([], [] if any(setting.get("momentum") for setting in settings) else None, [])
    for state, setting, w, g, steps in zip(states, settings, before, grads, counts):
        result.correction.append(1 + (steps - 1) * setting.get("lr_decay", 0.0))
        if not state:  # it never had a gradient, and does not move
            scaled = torch.zeros_like(w)
        else:
            second = state["sum"] if "sum" in state else state["square_avg"]
            if setting.get("centered"):
                second = second.addcmul(state["grad_avg"], state["grad_avg"], value=-1)
            if setting["weight_decay"]:
                g = g.add(w, alpha=setting["weight_decay"])
            scaled = g / second.sqrt().add_(setting["eps"])
        result.scaled.append(scaled)
        if result.momentum is not None:
            result.momentum.append(state["momentum_buffer"] if state and setting.get("momentum") else scaled)
    return result
