"""The path that one bias takes while it is trained: length, variance in a window, distance from its start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class BiasPath:
    """Follows iterates b⁰, b¹, … of a parameter: what an optimizer changes in place is a new iterate (by the parameter's
    version counter). An optimizer that hides its changes from that counter is seen at the ends of windows only.

    `length` Σ‖bᵗ⁺¹ − bᵗ‖ and `variance`, the mean of ‖bᵗ − mean b‖² over the iterates of the window, both ends included
    (|T| + 1 iterates for |T| steps, as Corollary 2 needs).
    """

    def __init__(self, parameter: Tensor):
        self._parameter, self._version = parameter, parameter._version
        self.initial = parameter.detach().clone()
        self.last = self.initial.clone()
        self._window()

    def _window(self) -> None:
        wide = torch.float32 if self.last.device.type == "mps" else torch.float64
        self.length = torch.zeros((), dtype=wide, device=self.last.device)
        self.squares = torch.zeros_like(self.length)
        self.mean = self.last.to(wide, copy=True)
        self.count = 1

    @torch.no_grad()
    def look(self, last: bool = False) -> None:
        """Takes the parameter as it is now, if it changed; `last`: in any case."""
        new = self._parameter._version != self._version
        if not (new or last):
            return
        self._version = self._parameter._version
        now = self._parameter.detach()
        self.length = self.length + torch.linalg.vector_norm(now - self.last)
        self.last.copy_(now)
        if new:
            self.count += 1
            off = now - self.mean  # Welford
            self.mean = self.mean + off / self.count
            self.squares = self.squares + (off * (now - self.mean)).sum()

    def read(self) -> dict[str, Tensor]:
        """The window's values; a new window starts at the last iterate."""
        self.look(last=True)
        found = {
            "raw": self.length,
            "variance": self.squares / self.count,
            "distance": torch.linalg.vector_norm(self.last - self.initial),
        }
        self._window()
        return found

    def state_dict(self) -> dict[str, Any]:
        self.look()
        names = ("initial", "last", "length", "count", "mean", "squares")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            old = getattr(self, name)
            setattr(self, name, value.to(old.device).clone() if isinstance(value, Tensor) else value)
        self._version = self._parameter._version
