"""Laws of squares under SGD with decay and momentum: their value from the start and the squared updates alone.

With S(a, b) the signed sum of a·b over a law, A = S(w, w) and W = S(w, v) for the momentum buffer v, a step v' = μ v + (1 − d)(g + λ w),
w' = w − η v' moves them by

    B = μ W + (1 − d) λ A,    A' = A − 2ηB + η² S(v', v'),    W' = B − η S(v', v'),

since S(w, g) = 0. So A follows a damped oscillator that the kinetic energy η² S(v', v') drives: the equations of Kunin, Sagastuy-Brena,
Ganguli, Yamins and Tanaka (2021, "Neural mechanics") for scale and rescale symmetries, without their limit of small steps. Without momentum
A' = (1 − ηλ)² A + η² S(g, g). In front of a normalization S(w, g) is not zero but known, from its eps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Motion:
    """Settings of one step of SGD: η, λ, μ, d, and whether the momentum buffer begins with this step."""

    rate: float
    decay: float
    momentum: float
    dampening: float
    fresh: bool

    @property
    def buffer_factor(self) -> float:
        """Factor of the old buffer."""
        return 0.0 if self.fresh else self.momentum

    @property
    def gain(self) -> float:
        """Factor of the new gradient."""
        return 1.0 if self.fresh else 1.0 - self.dampening


def kernels(motions: Sequence[Motion]) -> tuple[Floats, Floats, Floats]:
    """(A, W) after some steps, as sums over what they were and over the steps.

    Args:
        motions: The settings of each step.

    Returns:
        Coefficients (2, 2) of (A, W) before, (2, steps) of the squared updates S(v', v') (of S(g, g) without momentum), and (2, steps) of
        S(w, g).
    """
    start = np.eye(2)
    squares, known = np.zeros((2, len(motions))), np.zeros((2, len(motions)))
    for i in range(len(motions) - 1, -1, -1):
        motion, (alpha, beta) = motions[i], start.T
        rate = motion.rate
        if motion.momentum:
            of_product = beta - 2 * rate * alpha  # coefficient of B
            squares[:, i], known[:, i] = rate * (rate * alpha - beta), of_product * motion.gain
            start = np.stack([alpha + of_product * motion.gain * motion.decay, of_product * motion.buffer_factor], 1)
        else:
            shrunk = 1 - rate * motion.decay
            squares[:, i], known[:, i] = rate * rate * alpha, -2 * rate * shrunk * alpha
            start = np.stack([shrunk * shrunk * alpha, 0 * alpha], 1)
    return start, squares, known


class SquaresIntegral:
    """The value of every law by these equations; NaN where they do not apply.

    That is for other optimizers, Nesterov's momentum, steps that are not predicted, and laws whose weights have different settings.

    Args:
        value: The laws at the start, (channels,).
    """

    def __init__(self, value: Tensor):
        self.value = value.clone()
        self._velocity: Tensor | None = None  # W; None before the first step

    def advance(
        self,
        motions: Sequence[Sequence[Motion | None]],
        products: Mapping[str, Tensor],
        known: Tensor | None,
        group: Tensor,
    ) -> None:
        """Adds some steps.

        Args:
            motions: By step, the settings of each group of parameters; None where the equations do not apply.
            products: "gg" and, with momentum, "uu" and "wu": (steps, groups, channels), sums of squared gradients and updates, and of
                weights times updates.
            known: S(w, g) of every step where it is not zero, (steps, channels).
            group: The group of each channel, (channels,); −1 where weights of several groups make up the law.
        """
        value, velocity = torch.full_like(self.value, torch.nan), torch.full_like(self.value, torch.nan)
        for number, own in enumerate(zip(*motions)):
            if any(motion is None for motion in own):
                continue
            steps: list[Motion] = list(own)
            start, squares, of_known = (torch.from_numpy(k).to(self.value.device) for k in kernels(steps))
            before = torch.stack([self.value, self._first_velocity(steps[0], number, products, known)])
            forces = torch.stack(
                [products["uu" if motion.momentum else "gg"][i, number] for i, motion in enumerate(steps)]
            )
            after = start @ before + squares @ forces
            after = after if known is None else after + of_known @ known
            value, velocity = (torch.where(group == number, a, b) for a, b in zip(after, (value, velocity)))
        self.value, self._velocity = value, velocity

    def _first_velocity(
        self, motion: Motion, number: int, products: Mapping[str, Tensor], known: Tensor | None
    ) -> Tensor:
        """W before the first of some steps; at the very first from the update, since the buffer may be older than the ledger."""
        if self._velocity is not None:
            return self._velocity
        if not motion.buffer_factor:
            return torch.zeros_like(self.value)
        pull = motion.decay * self.value + (0.0 if known is None else known[0])
        return (products["wu"][0, number] - motion.gain * pull) / motion.buffer_factor

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, for a checkpoint."""
        velocity = None if self._velocity is None else self._velocity.clone()
        return {"value": self.value.clone(), "velocity": velocity}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restores the state; that of earlier versions holds none, and there is no integral then."""
        if state is None:
            self.value = torch.full_like(self.value, torch.nan)
            return
        self.value = state["value"].to(self.value).clone()
        self._velocity = None if state["velocity"] is None else state["velocity"].to(self.value).clone()
