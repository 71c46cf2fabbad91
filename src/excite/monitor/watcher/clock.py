"""The time that measuring takes from training."""

from __future__ import annotations

import time

import torch

from excite._core.background import DeviceTimer


class TrainingClock:
    """Seconds of training, and seconds spent in `watch.step`.

    On a GPU, time spent is that by which the GPU is delayed: what the host spends while the GPU is busy with training costs nothing.

    Args:
        device: Device of the model.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._timer: DeviceTimer | None = None
        self._spent = 0.0
        self._spent_before = 0.0  # before training began
        self._began = time.monotonic()
        self.paid = 0.0  # of the time spent, what probes with a `PaidSchedule` took
        self.steps = 0  # since training began

    def begin_training(self) -> None:
        """What was spent so far is not taken from training, and counts for no budget."""
        began, self._began = self._began, time.monotonic()
        self._spent = self._spent_before = self._began - began - self.paid
        self._timer = DeviceTimer(self._device) if self._device.type == "cuda" else None
        self.paid = 0.0

    def start(self, wait: bool) -> tuple[float, object]:
        """Begins a measurement; `wait`: once the device has finished. Returns what `stop` takes."""
        started = None if self._timer is None else self._timer.start()
        return self.now(wait), started

    def stop(self, start: tuple[float, object]) -> None:
        """Ends a measurement."""
        self._spent += time.monotonic() - start[0]
        if self._timer is not None:
            self._timer.stop(start[1])

    def now(self, wait: bool = False) -> float:
        """The time in seconds; `wait`: once the device has finished."""
        if wait and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds of measuring, without what probes with a `PaidSchedule` took."""
        return self._spent - self.paid

    @property
    def trained(self) -> float:
        """Seconds since training began that were not spent on measuring."""
        return 0.0 if self.steps == 0 else time.monotonic() - self._began - (self._spent - self._spent_before)

    @property
    def fraction(self) -> float:
        """Fraction of the time since training began that measuring took."""
        total = time.monotonic() - self._began
        spent = self._spent - self._spent_before if self._timer is None else self._timer.seconds
        return spent / total if total > 0 else 0.0
