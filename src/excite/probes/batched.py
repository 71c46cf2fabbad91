"""Promises that are kept together: what one of them is asked for is computed for all that wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock

import torch
from torch import Tensor

from excite.probes.protocol import Values

_MOST = 64  # tensors that wait together
_BYTES = 1 << 26


class Promise(Future[Values]):
    """Kept when its result is asked for, from whichever thread. `here` says that no device has to be waited for then."""

    def __init__(self, group: _Group, here: bool):
        super().__init__()
        self._group, self.here = group, here

    def result(self, timeout: float | None = None) -> Values:
        self._group.keep()
        return super().result(timeout)


class Batched:
    """Makes values out of tensors of one shape, many at a time: `work` takes them stacked, and returns one result for each.

    For what is measured at every step and written much later: a few operations on 64 tensors cost as much as on one.
    """

    def __init__(self, work: Callable[[Tensor], Sequence[Values]]):
        self._work = work
        self._group: _Group | None = None

    def promise(self, tensor: Tensor) -> Promise:
        """The tensor is kept as it is; it must not be changed."""
        if self._group is None or not self._group.takes(tensor):
            self._group = _Group(self._work)
        return self._group.add(tensor)


class _Group:
    def __init__(self, work: Callable[[Tensor], Sequence[Values]]):
        self._work, self._lock = work, Lock()
        self._waiting: list[tuple[Promise, Tensor]] = []
        self._kept = False

    def takes(self, tensor: Tensor) -> bool:
        many = len(self._waiting)
        return not self._kept and many < _MOST and (many + 1) * tensor.nbytes <= _BYTES

    def add(self, tensor: Tensor) -> Promise:
        promise = Promise(self, tensor.device.type == "cpu")
        with self._lock:
            self._waiting.append((promise, tensor))
        return promise

    def keep(self) -> None:
        with self._lock:
            self._kept = True
            waiting, self._waiting = self._waiting, []
            if not waiting:
                return
            try:
                results = self._work(torch.stack([tensor for _, tensor in waiting]))
            except Exception as error:
                for promise, _ in waiting:
                    promise.set_exception(error)
                return
            for (promise, _), values in zip(waiting, results):
                promise.set_result(values)
