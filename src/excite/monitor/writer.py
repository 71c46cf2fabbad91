"""Where measured values go: the run and the sinks. What fails there must not end somebody's training."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from excite._core.background import submit
from excite.errors import RunError, one_line
from excite.runs import Run

Row = tuple[int, dict[str, float]]  # step, values by name

_MOST = 200_000  # values kept in memory while they cannot be written
_PATIENCE = 0.5  # seconds to wait for a locked database
_PAUSE, _LONGEST = 2.0, 60.0  # seconds before the next try, doubled each time


class Sink(Protocol):
    """A place for values beside the run, such as TensorBoard."""

    name: str

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """Writes values to a run and to sinks. A full disk or a locked database is reported, and tried again later.

    Meanwhile values wait in memory, the newest 200,000 of them; `lost` counts those that had to go. The disk is waited for in
    another thread.
    """

    def __init__(self, run: Run | None, sinks: Sequence[Sink], strict: bool):
        self.run, self.sinks, self.strict = run, list(sinks), strict
        self.lost = 0
        self._waiting: deque[Row] = deque()
        self._size = 0  # values that wait, those on their way included
        self._going: list[Row] = []
        self._result: Future[Exception | None] | None = None  # of those on their way
        self._pause, self._again = 0.0, 0.0  # 0 while all is well

    def write(self, rows: Sequence[Row]) -> None:
        """Put (step, values by name) on their way to the disk, and into the sinks."""
        for sink in list(self.sinks):
            try:
                for step, values in rows:
                    sink.log(step, values)
            except Exception as error:
                self._drop(sink, error)
        if self.run is None:
            return
        for row in rows:
            self._waiting.append(row)
            self._size += len(row[1])
        if self._result is not None and (self._result.done() or self._size > _MOST):  # faster than the disk
            self._arrived()
        if self._result is None and self._waiting and (not self._pause or time.monotonic() >= self._again):
            self._send()
        self._trim()

    def settle(self) -> None:
        """Wait until what was written is on the disk, or could not be put there."""
        if self._result is not None:
            self._arrived()
            if self._waiting and not self._pause:
                self._send()
                self._arrived()

    def close(self) -> None:
        """Write what waits, or say how much could not be written; close the sinks."""
        self.settle()
        if self.run is not None and self._waiting:
            self._send()
            self._arrived()
        if self.lost or self._waiting:
            self.lost += self._size
            self._waiting.clear()
            _warn(f"{self.lost} measured values are lost: {self._where()} could not be written")
        for sink in list(self.sinks):
            try:
                sink.close()
            except Exception as error:
                self._drop(sink, error)

    def rewind(self, step: int) -> None:
        """Forget what waits of the steps after this one, once nothing is on its way."""
        if self._result is not None:
            self._arrived()
        self._waiting = deque(row for row in self._waiting if row[0] <= step)
        self._size = sum(len(values) for _, values in self._waiting)

    def _send(self) -> None:
        self._going, self._waiting = list(self._waiting), deque()
        self._result = submit(partial(self._put, self._going, again=self._pause > 0))

    def _put(self, rows: list[Row], again: bool) -> Exception | None:
        assert self.run is not None
        try:
            with self.run.patience(_PATIENCE):
                if again:
                    self.run.flush()  # what failed last time; only then does more go into its buffer
                for step, values in rows:
                    self.run.log(step, values)
                self.run.flush()
        except Exception as error:
            return error
        return None

    def _arrived(self) -> None:
        """Wait for those on their way; those that could not be written wait again, before the others."""
        assert self._result is not None
        error = self._result.result()
        going, self._result, self._going = self._going, None, []
        if error is not None:
            self._waiting.extendleft(reversed(going))
            if self.strict or not isinstance(error, RunError):
                raise error
            if not self._pause:
                _warn(
                    f"values from step {going[0][0]} on cannot be written for now, training goes on: {one_line(error)}"
                )
            self._pause = min(2 * self._pause or _PAUSE, _LONGEST)
            self._again = time.monotonic() + self._pause
            self._trim()
            return
        self._size -= sum(len(values) for _, values in going)
        if self._pause:
            missing = f"; {self.lost} values are lost" if self.lost else ", nothing is lost"
            _warn(f"values are written to {self._where()} again{missing}")
        self._pause = 0.0

    def _trim(self) -> None:
        while self._size > _MOST and self._waiting:
            self.lost += len(self._waiting[0][1])
            self._size -= len(self._waiting.popleft()[1])

    def _where(self) -> str:
        return str(self.run.path) if self.run is not None else "the run"

    def _drop(self, sink: Sink, error: Exception) -> None:
        if self.strict:
            raise error
        self.sinks.remove(sink)
        _warn(f"{sink.name} is switched off, training goes on; it raised: {type(error).__name__}: {one_line(error)}")


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)
