"""Buffer of measured values between the probes and the writer: nothing in the training loop waits for a device.

Values stay where they were computed until there are enough of them, or some time has passed. Then all of them are fetched
with one transfer per device and dtype, in a background thread if a device is involved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from excite._core.background import submit_after_gpu
from excite._core.distributed import rank_and_size
from excite.errors import InputError
from excite.probes.base import Deferred, Measurement, Probe, Values
from excite.runs.checks import is_name

_MEASUREMENTS = 48  # buffered before they are fetched: a larger batch keeps the Python interpreter busy for longer
_STEPS = 64  # between the oldest buffered measurement and the fetch
_SECONDS = 1.0  # between two fetches
_TRAVEL = 8  # steps from a request to its results with several processes, which have to agree on the step


class DeviceScalars:
    """Named scalars of one measurement, copied out of the tensors they came from: a view of a weight would change with it.

    Scalars on a device are stacked by one kernel and later fetched with those of other measurements by one transfer.

    Args:
        values: Numbers, or tensors with one element, by name.

    Raises:
        InputError: If a name is not a valid metric name or a value is not a single number.
    """

    def __init__(self, values: Mapping[str, object]):
        self._numbers: dict[str, float] = {}
        self._stacks: list[tuple[list[str], Tensor]] = []
        by_type: dict[tuple[torch.device, torch.dtype], tuple[list[str], list[Tensor]]] = {}
        for name, value in values.items():
            if not is_name(name):
                raise InputError(f"expected keys such as 'norm' or 'norm/fc1'; got {name!r}")
            if type(value) is float:  # most of them
                self._numbers[name] = value
            elif isinstance(value, Tensor) and value.numel() == 1:
                value = value.detach() if value.requires_grad else value
                full_tensor = getattr(value, "full_tensor", None)  # of a DTensor, as FSDP has them
                value = value if full_tensor is None else full_tensor()
                if value.device.type == "cpu":
                    self._numbers[name] = float(value)
                    continue
                names, tensors = by_type.setdefault((value.device, value.dtype), ([], []))
                names.append(name)
                tensors.append(value.reshape(()))
            elif isinstance(value, int | float):
                self._numbers[name] = float(value)
            else:
                what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise InputError(f"{name}: expected one number; got {what}")
        self._names = list(values)
        for names, tensors in by_type.values():
            self._stacks.append((names, torch.stack(tensors)))

    @classmethod
    def of(cls, probe: Probe, values: Values) -> DeviceScalars:
        """The values of a probe under their full names, `probe/quantity/layer`."""
        return cls({f"{probe.name}/{key}": value for key, value in values.items()})

    def __len__(self) -> int:
        return len(self._names)

    @property
    def on_device(self) -> bool:
        """Whether some of them have to be fetched."""
        return bool(self._stacks)

    @staticmethod
    def fetch(several: Sequence[DeviceScalars]) -> list[dict[str, float]]:
        """The numbers of each, in their order. Waits for the device."""
        by_type: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for scalars in several:
            for _, stack in scalars._stacks:
                by_type.setdefault((stack.device, stack.dtype), []).append(stack)
        fetched = {key: iter(torch.cat(stacks).tolist()) for key, stacks in by_type.items()}
        result = []
        for scalars in several:
            if not scalars._stacks:
                result.append(scalars._numbers)
                continue
            numbers = dict(scalars._numbers)
            for names, stack in scalars._stacks:
                values = fetched[(stack.device, stack.dtype)]
                numbers |= {name: float(next(values)) for name in names}
            result.append({name: numbers[name] for name in scalars._names})
        return result


Entry = DeviceScalars | Deferred | Future[Values] | Exception | None  # None: the probe raised when it measured
Buffered = tuple[int, Probe, Entry]
Fetched = tuple[int, Probe, dict[str, float] | Exception | None]


class MetricBuffer:
    """Buffers measurements and fetches them asynchronously, by count or time.

    `add` takes measurements; once they are `due`, `request` starts a fetch; once that is `ready`, `drain` returns the rows.
    """

    def __init__(self) -> None:
        self._buffered: list[Buffered] = []
        self._count, self._first = 0, 0  # measurements, and the step of the first: the same in all processes
        self._in_flight: Future[list[Fetched]] | None = None
        self._requested_at = 0  # step
        self._time = (
            math.inf
        )  # of the last request. Not before `start`: a resumed run first discards rows past its checkpoint

    def start(self) -> None:
        """Starts the clock of fetches by time."""
        self._time = time.monotonic()

    def clear(self) -> None:
        """Discards everything buffered or in flight."""
        self._buffered, self._count, self._in_flight = [], 0, None

    def add(self, step: int, probe: Probe, measurement: Measurement | None) -> None:
        """Buffers what `probe` returned at `step`; None if it raised."""
        entry: Entry
        if isinstance(measurement, Deferred):
            # What needs no preparation starts now, so that the next measurement of the probe finds it finished.
            entry = measurement if measurement.prepare is not None else submit_after_gpu(measurement.compute)
        else:
            entry = DeviceScalars.of(probe, measurement) if isinstance(measurement, Mapping) else measurement
        self._first = self._first if self._count else step
        self._count += 1
        # Processes reduce the same list of rows: an empty one keeps its place.
        if not isinstance(entry, DeviceScalars) or len(entry) or rank_and_size()[1] > 1:
            self._buffered.append((step, probe, entry))

    def add_scalars(self, step: int, probe: Probe, scalars: DeviceScalars) -> None:
        """Buffers values that take no part in what several processes agree on: each may have others, or none."""
        if rank_and_size()[1] == 1:
            self._first = self._first if self._count else step
            self._count += 1
        self._buffered.append((step, probe, scalars))

    def due(self, step: int) -> bool:
        """Whether to request a fetch. With several processes only counts decide, which are the same in all."""
        if not self._buffered or not self._count:
            return False
        if self._count >= _MEASUREMENTS or step - self._first >= _STEPS:
            return True
        return time.monotonic() - self._time > _SECONDS and rank_and_size()[1] == 1

    def request(self, step: int) -> None:
        """Starts to fetch what is buffered: here, or in the background thread if a device has to be waited for."""
        buffered, self._buffered, self._count = self._buffered, [], 0
        self._requested_at, self._time = step, time.monotonic()
        prepared = [_prepare(*row) for row in buffered]
        if any(isinstance(entry, Future) or getattr(entry, "on_device", False) for _, _, entry in prepared):
            self._in_flight = submit_after_gpu(lambda: _fetch(prepared))
            return
        self._in_flight = Future()
        self._in_flight.set_result(_fetch(prepared))

    def ready(self, step: int) -> bool:
        """Whether `drain` returns rows without waiting; with several processes after a fixed number of steps."""
        if self._in_flight is None:
            return False
        return self._in_flight.done() if rank_and_size()[1] == 1 else step >= self._requested_at + _TRAVEL

    def drain(self) -> list[Fetched]:
        """The rows of the last request, in the order they were added; waits for them."""
        in_flight, self._in_flight = self._in_flight, None
        return [] if in_flight is None else in_flight.result()


def _prepare(step: int, probe: Probe, entry: Entry) -> Buffered:
    """The part of a deferred computation that belongs to the training thread."""
    try:
        if isinstance(entry, Deferred) and entry.prepare is not None:
            entry.prepare()
    except Exception as error:
        return step, probe, error
    return step, probe, entry


def _fetch(buffered: Sequence[Buffered]) -> list[Fetched]:
    """All values as numbers; an exception of a deferred computation takes the place of its values."""
    rows: list[tuple[int, Probe, DeviceScalars | Exception | None]] = []
    for step, probe, entry in buffered:
        try:
            if isinstance(entry, Deferred):
                rows.append((step, probe, DeviceScalars.of(probe, entry.compute())))
            else:
                rows.append(
                    (step, probe, DeviceScalars.of(probe, entry.result()) if isinstance(entry, Future) else entry)
                )
        except Exception as error:
            rows.append((step, probe, error))
    numbers = iter(DeviceScalars.fetch([row[2] for row in rows if isinstance(row[2], DeviceScalars)]))
    return [(step, probe, next(numbers) if isinstance(entry, DeviceScalars) else entry) for step, probe, entry in rows]
