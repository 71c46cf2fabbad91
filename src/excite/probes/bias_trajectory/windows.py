"""Sums of the trajectory probe over a window of steps.

On a CPU in plain numbers, because dozens of operations on small tensors would cost more than a training step allows; on other
devices in tensors, because nothing may wait for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_FOLD = 64  # passes whose norms may wait on a device before they are summed up


def wide(device: torch.device) -> torch.dtype:
    """The widest floating point numbers of the device."""
    return torch.float32 if device.type == "mps" else torch.float64


class Sums:
    """Normalized updates ‖dL/dz‖ / ‖dL/df‖ of one layer, over a window and since the start."""

    _names = ("length", "samples", "zero", "seen", "largest", "total")

    def __init__(self, device: torch.device):
        self._device, self._cpu = device, device.type == "cpu"
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self.total: Any = self._nothing()
        self._window()

    def _nothing(self) -> Any:
        return 0.0 if self._cpu else torch.zeros((), dtype=wide(self._device), device=self._device)

    def _window(self) -> None:
        self.length = self.samples = self.zero = self.seen = self.largest = self._nothing()

    def add(self, norms: Tensor, errors: Tensor) -> None:
        """(‖dL/dz‖, ‖dL/df‖) of one backward pass, each (B,). Samples without a loss gradient are left out and counted."""
        if not self._cpu:
            self._pairs.append((norms, errors))
            if len(self._pairs) >= _FOLD:
                self._fold()
            return
        length = 0.0
        for norm, error in zip(norms.tolist(), errors.tolist()):
            if error == 0:
                self.zero += 1
            elif (value := norm / error) < math.inf:
                length += value
                self.samples += 1
                self.largest = max(self.largest, value)
        self.length, self.total, self.seen = self.length + length, self.total + length, self.seen + len(norms)

    def _fold(self) -> None:
        if not self._pairs:
            return
        norms, errors = (torch.cat(column) for column in zip(*self._pairs))
        self._pairs.clear()
        values = norms / errors
        finite = torch.nan_to_num(values, nan=0.0, posinf=0.0)
        length = finite.sum(dtype=self.total.dtype)
        self.length, self.total, self.seen = self.length + length, self.total + length, self.seen + len(norms)
        self.largest = torch.maximum(self.largest, finite.max())
        self.samples = self.samples + (values < math.inf).sum()
        self.zero = self.zero + (errors == 0).sum()

    def read(self) -> dict[str, float | Tensor]:
        """The window's values; a new window starts."""
        self._fold()
        if self._cpu:
            none = not self.samples
            mean, largest = math.nan if none else self.length / self.samples, math.nan if none else self.largest
        else:
            mean = self.length / self.samples  # 0 / 0 is NaN
            largest = torch.where(self.samples > 0, self.largest, math.nan)
        result = {
            "mean": mean,
            "max": largest,
            "length": self.length,
            "total": self.total,
            "samples": self.samples,
            "zero": self.zero,
            "nonfinite": self.seen - self.samples - self.zero,
        }
        self._window()
        return result

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, for a checkpoint."""
        self._fold()
        return {name: getattr(self, name) for name in self._names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        for name in self._names:
            value = state[name]
            setattr(self, name, float(value) if self._cpu else torch.as_tensor(value).to(self.total).clone())


class BiasPath:
    """Follows the iterates b⁰, b¹, … of a parameter.

    What an optimizer changes in place is a new iterate (by the parameter's version counter). An optimizer that hides its changes from
    that counter is read at the ends of windows only.

    `length` Σ‖bᵗ⁺¹ − bᵗ‖ and `variance`, the mean of ‖bᵗ − mean b‖² over the iterates of the window, both ends included
    (|T| + 1 iterates for |T| steps, as Corollary 2 needs).
    """

    _names = ("initial", "last", "mean", "length", "squares", "count")

    def __init__(self, parameter: Tensor):
        self._parameter, self._version, self._counts = parameter, parameter._version, False
        self._cpu = parameter.device.type == "cpu"
        self.initial = self.last = self._current_value()
        self._window()

    def _current_value(self) -> Any:
        """The parameter as a vector of its own."""
        value = self._parameter.detach().to(wide(self._parameter.device), copy=True).reshape(-1)
        return value.numpy() if self._cpu else value

    def _window(self) -> None:
        self.length = self.squares = self.last[:1].sum() * 0.0
        self.mean, self.count = self.last, 1

    def measure_updates(self) -> None:
        """Takes the parameter as it is now, if it changed."""
        if self._parameter._version == self._version:
            return
        self._version, self._counts = self._parameter._version, True
        current = self._current_value()
        step, off = current - self.last, current - self.mean
        self.length = self.length + (step @ step) ** 0.5
        self.last = current
        self.count += 1
        self.mean = self.mean + off / self.count  # Welford
        self.squares = self.squares + off @ (current - self.mean)

    def read(self) -> dict[str, float | Tensor]:
        """The window's values; a new window starts at the last iterate."""
        self.measure_updates()
        if not self._counts:
            current = self._current_value()
            step, self.last = current - self.last, current
            self.length = self.length + (step @ step) ** 0.5
        far = self.last - self.initial
        result = {"raw": self.length, "variance": self.squares / self.count, "distance": (far @ far) ** 0.5}
        self._window()
        return {name: float(value) for name, value in result.items()} if self._cpu else result

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, for a checkpoint."""
        self.measure_updates()
        result = {name: getattr(self, name) for name in self._names}
        return {k: v if k == "count" else torch.as_tensor(v).clone() for k, v in result.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        for name in self._names:
            value = state[name]
            if name != "count":
                value = value.to(self._parameter.device, copy=True)
                value = value.numpy() if self._cpu else value
            setattr(self, name, value)
        self._version = self._parameter._version
