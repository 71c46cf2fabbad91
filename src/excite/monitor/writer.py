"""Writer of measured values to the run and the sinks. Errors there do not end the training."""

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

StepValues = tuple[int, dict[str, float]]  # step, values by name

_MAX_VALUES = 200_000  # queued while they cannot be written
_PATIENCE = 0.5  # seconds to wait for a locked database
_PAUSE, _MAX_PAUSE = 2.0, 60.0  # seconds before the next try, doubled each time


class Sink(Protocol):
    """A destination for values beside the run, such as TensorBoard.

    Attributes:
        name: Name of the sink in warnings.
    """

    name: str

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the values of one step, by metric name."""

    def close(self) -> None:
        """Called once, when the watch is closed."""


class MetricWriter:
    """Writes values to a run, from a queue in the background thread, and to sinks.

    Each batch is one transaction. If the disk is full or the database locked, a warning is issued and the batch is tried
    again later; meanwhile the newest 200,000 values stay in the queue, and `lost` counts those dropped from it.

    Args:
        run: The run, or None to write to sinks only.
        sinks: Further destinations. One that raises is switched off with a warning.
        strict: Raise errors of the run and of sinks instead.
    """

    def __init__(self, run: Run | None, sinks: Sequence[Sink], strict: bool):
        self.run, self.sinks, self.strict = run, list(sinks), strict
        self.lost = 0
        self._queue: deque[StepValues] = deque()
        self._size = 0  # values in the queue and in flight
        self._in_flight: list[StepValues] = []
        self._result: Future[Exception | None] | None = None  # of the batch in flight
        self._pause, self._retry_at = 0.0, 0.0  # 0 while writing works

    def write(self, rows: Sequence[StepValues], to_sinks: bool = True) -> None:
        """Queues (step, values by name) for the run and passes them to the sinks."""
        for sink in list(self.sinks) if to_sinks else []:
            try:
                for step, values in rows:
                    sink.log(step, values)
            except Exception as error:
                self._switch_off(sink, error)
        if self.run is None:
            return
        for row in rows:
            self._queue.append(row)
            self._size += len(row[1])
        if self._result is not None and (self._result.done() or self._size > _MAX_VALUES):  # faster than the disk
            self._finish()
        if self._result is None and self._queue and (not self._pause or time.monotonic() >= self._retry_at):
            self._start()
        self._trim()

    def drain(self) -> None:
        """Waits until the queue is on the disk, or could not be written."""
        if self._result is not None:
            self._finish()
            if self._queue and not self._pause:
                self._start()
                self._finish()

    def close(self) -> None:
        """Writes the queue, or warns how many values could not be written; closes the sinks."""
        self.drain()
        if self.run is not None and self._queue:
            self._start()
            self._finish()
        if self.lost or self._queue:
            self.lost += self._size
            self._queue.clear()
            _warn(f"{self.lost} measured values are lost: {self._location()} could not be written")
        for sink in list(self.sinks):
            try:
                sink.close()
            except Exception as error:
                self._switch_off(sink, error)

    def rewind(self, step: int) -> None:
        """Removes queued values of the steps after `step`, once nothing is in flight."""
        if self._result is not None:
            self._finish()
        self._queue = deque(row for row in self._queue if row[0] <= step)
        self._size = sum(len(values) for _, values in self._queue)

    def _start(self) -> None:
        self._in_flight, self._queue = list(self._queue), deque()
        self._result = submit(partial(self._log, self._in_flight))

    def _log(self, rows: list[StepValues]) -> Exception | None:
        assert self.run is not None
        try:
            with self.run.patience(_PATIENCE):
                self.run.log_many(rows)
        except Exception as error:
            return error
        return None

    def _finish(self) -> None:
        """Waits for the batch in flight; if it could not be written, it goes back to the front of the queue."""
        assert self._result is not None
        error = self._result.result()
        batch, self._result, self._in_flight = self._in_flight, None, []
        if error is not None:
            self._queue.extendleft(reversed(batch))
            if self.strict or not isinstance(error, RunError):
                raise error
            if not self._pause:
                _warn(
                    f"values from step {batch[0][0]} on cannot be written for now, training continues: {one_line(error)}"
                )
            self._pause = min(2 * self._pause or _PAUSE, _MAX_PAUSE)
            self._retry_at = time.monotonic() + self._pause
            self._trim()
            return
        self._size -= sum(len(values) for _, values in batch)
        if self._pause:
            missing = f"; {self.lost} values are lost" if self.lost else ", nothing is lost"
            _warn(f"values are written to {self._location()} again{missing}")
        self._pause = 0.0

    def _trim(self) -> None:
        while self._size > _MAX_VALUES and self._queue:
            self.lost += len(self._queue[0][1])
            self._size -= len(self._queue.popleft()[1])

    def _location(self) -> str:
        return str(self.run.path) if self.run is not None else "the run"

    def _switch_off(self, sink: Sink, error: Exception) -> None:
        if self.strict:
            raise error
        self.sinks.remove(sink)
        _warn(f"{sink.name} is switched off, training continues; it raised: {type(error).__name__}: {one_line(error)}")


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)
