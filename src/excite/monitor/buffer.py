"""Measurements on their way from the probes to the run: nothing in the training loop waits for a device."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future

from excite._core.background import submit_after_gpu
from excite._core.distributed import rank_and_size
from excite.monitor.device_scalars import Measured
from excite.probes import Probe
from excite.probes.base import Values
from excite.probes.batched import Promise

Asked = tuple[int, Probe, Measured | Future[Values] | None]  # step, probe, what it gave; None: it raised
Fetched = tuple[int, Probe, dict[str, float] | Exception | None]

_MEASUREMENTS = 48  # that may wait before they are fetched: the more at once, the longer Python is busy with it
_STEPS = 64  # that the first of them may wait for the others
_SECONDS = 1.0  # and how long
_TRAVEL = 8  # steps that they have for the way, where several processes have to agree on the step at which they arrive


class Pending:
    """Values wait here, are asked for when there are many, or after some time, and arrive a little later."""

    def __init__(self) -> None:
        self._waiting: list[Asked] = []
        self._count, self._first = 0, 0  # of those that wait, and the step of the first: the same for all processes
        self._coming: Future[list[Fetched]] | None = None
        self._step = 0  # at which they were asked for
        self._time = math.inf  # not yet: a training that starts over first clears what an earlier try has written

    def start(self) -> None:
        self._time = time.monotonic()

    def clear(self) -> None:
        self._waiting, self._count, self._coming = [], 0, None

    def add(self, step: int, probe: Probe, measured: Measured | Future[Values] | None) -> None:
        self._first = self._first if self._count else step
        self._count += 1
        # Several processes go through the same list: a place is kept also for what has nothing to say here.
        if not isinstance(measured, Measured) or len(measured) or rank_and_size()[1] > 1:
            self._waiting.append((step, probe, measured))

    def due(self, step: int) -> bool:
        """Whether it is time to ask. Of several processes only counts, the same for all, may decide."""
        if not self._waiting:
            return False
        if self._count >= _MEASUREMENTS or step - self._first >= _STEPS:
            return True
        return time.monotonic() - self._time > _SECONDS and rank_and_size()[1] == 1

    def ask(self, step: int) -> None:
        """Fetch what waits: at once, or in another thread where a device has to be waited for."""
        waiting, self._waiting, self._count = self._waiting, [], 0
        self._step, self._time = step, time.monotonic()
        for _, _, measured in waiting:
            if isinstance(measured, Promise):
                measured.begin()
        if not all(getattr(measured, "here", False) for _, _, measured in waiting):
            self._coming = submit_after_gpu(lambda: _numbers(waiting))
            return
        self._coming = Future()
        self._coming.set_result(_numbers(waiting))

    def arrived(self, step: int) -> bool:
        if self._coming is None:
            return False
        return self._coming.done() if rank_and_size()[1] == 1 else step >= self._step + _TRAVEL

    def take(self) -> list[Fetched]:
        """What was asked for; waits for it."""
        coming, self._coming = self._coming, None
        return [] if coming is None else coming.result()


def _numbers(waiting: list[Asked]) -> list[Fetched]:
    """What was promised is waited for; what a promise raised stands in its place."""
    kept: list[tuple[int, Probe, Measured | Exception | None]] = []
    for step, probe, measured in waiting:
        try:
            kept.append((step, probe, named(probe, measured.result()) if isinstance(measured, Future) else measured))
        except Exception as error:
            kept.append((step, probe, error))
    numbers = iter(Measured.fetch([one for _, _, one in kept if isinstance(one, Measured)]))
    return [(step, probe, next(numbers) if isinstance(one, Measured) else one) for step, probe, one in kept]


def named(probe: Probe, values: Values) -> Measured:
    return Measured({f"{probe.name}/{key}": value for key, value in values.items()})
