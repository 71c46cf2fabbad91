"""A radius that nobody has to tune: relative to each layer's signal, grown while the fit holds, drawn back when it goes.

One radius in every layer works where it fits the network and collapses training to a constant output where it does not.
The controller watches two numbers of each training step, smoothed over about ten of them:

    strain = mean error at the two extremes / error of the best constant output
    spread = variance of the middle of the two extremes / variance of the targets      (squared error only)

and moves the factor r, where the radius of a layer is r times the root mean square of its input:

    r ← r·(1 + GROW)   while strain < CALM
    r ← r·(1 − BACK)   while strain > TENSE, or spread < FLAT; never below START
    r stays            between

At strain 1 the network is no better than a constant; a spread of 0 says that it has become one. Backing off is faster
than growing, so that a network that begins to collapse is let go before its units are dead. Everything is computed with
tensors where the model is: nothing waits for a GPU, and a captured step contains its controller.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

START, MOST = 1e-3, 1.0
GROW, BACK = 0.01, 0.03
CALM, TENSE, FLAT = 0.35, 0.5, 0.1
MEMORY = 0.9


class Auto:
    """The controller's state: `factor`, `strain`, `spread`, each a tensor of one number in float32."""

    def __init__(self) -> None:
        self.factor = torch.tensor(START)
        self.strain = torch.tensor(1.0)
        self.spread = torch.tensor(1.0)

    def to(self, device: torch.device) -> None:
        """Moves the state to a device."""
        if self.factor.device != device:
            self.factor, self.strain, self.spread = (t.to(device) for t in (self.factor, self.strain, self.spread))

    @torch.no_grad()
    def observe(self, strain: Tensor, spread: Tensor | None) -> None:
        """One training step, seen."""
        seen = torch.stack([strain.float(), self.spread.float() if spread is None else spread.float()])
        # A batch that tells nothing (one class only, an overflow) is passed over.
        usual = torch.stack([self.strain, self.spread])
        seen = torch.where(torch.isfinite(seen), seen.clamp(0, 10), usual)
        self.strain.copy_(MEMORY * self.strain + (1 - MEMORY) * seen[0])
        self.spread.copy_(MEMORY * self.spread + (1 - MEMORY) * seen[1])
        collapsing = (self.strain > TENSE) | (self.spread < FLAT)
        change = torch.where(collapsing, 1 - BACK, torch.where(self.strain < CALM, 1 + GROW, 1.0))
        self.factor.copy_((self.factor * change).clamp(START, MOST))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the controller, for a checkpoint."""
        return {name: float(getattr(self, name)) for name in ("factor", "strain", "spread")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state of the controller."""
        for name in ("factor", "strain", "spread"):
            getattr(self, name).fill_(state[name])

    def __repr__(self) -> str:
        return (
            f"Auto(factor={float(self.factor):.3g}, strain={float(self.strain):.2g}, spread={float(self.spread):.2g})"
        )
