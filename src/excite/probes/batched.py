"""Promises that are kept together: what one of them is asked for is computed for all that wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock

import torch
from torch import Tensor

from excite.probes.base import Values


class Promise(Future[Values]):
    """Kept when its result is asked for, from whichever thread. `here` says that no device has to be waited for then."""

    def __init__(self, group: _Group, here: bool):
        super().__init__()
        self._group, self.here = group, here

    def begin(self) -> None:
        """To be called by the thread that trains before another one asks for the result: what was measured is collected."""
        self._group.collect()

    def result(self, timeout: float | None = None) -> Values:
        self._group.keep()
        return super().result(timeout)


class Batched:
    """Makes values out of tensors of one shape, up to `most` at a time: `work` takes them stacked, and returns one result for each.

    For what is measured at every step and written much later: a few operations on 64 tensors cost as much as on one.
    """

    def __init__(self, work: Callable[[Tensor], Sequence[Values]], most: int = 64):
        self._work, self._most = work, most
        self._group: _Group | None = None

    def promise(self, read: Callable[[], Tensor], here: bool) -> Promise:
        """`read` gives the tensor, when it is needed."""
        promise = None if self._group is None else self._group.add(read, here)
        if promise is None:
            self._group = _Group(self._work, self._most)
            promise = self._group.add(read, here)
        assert promise is not None
        return promise

    def clear(self) -> None:
        """What was promised so far is not computed together with what comes."""
        self._group = None


class _Group:
    def __init__(self, work: Callable[[Tensor], Sequence[Values]], most: int):
        self._work, self._most, self._lock = work, most, Lock()
        self._promises: list[Promise] = []
        self._reads: list[Callable[[], Tensor]] = []
        self._stack: Tensor | None = None
        self._begun = False

    def add(self, read: Callable[[], Tensor], here: bool) -> Promise | None:
        """None if there is no place any more."""
        with self._lock:
            if self._begun or len(self._promises) == self._most:
                return None
            self._promises.append(Promise(self, here))
            self._reads.append(read)
            return self._promises[-1]

    def collect(self) -> None:
        with self._lock:
            if not self._begun:
                self._begun = True
                try:
                    self._stack = torch.stack([read() for read in self._reads])
                except Exception as error:
                    self._fail(error)
                self._reads.clear()

    def keep(self) -> None:
        self.collect()
        with self._lock:
            stack, self._stack = self._stack, None
            if stack is None:
                return
            try:
                results = self._work(stack)
            except Exception as error:
                self._fail(error)
                return
            for promise, values in zip(self._promises, results):
                promise.set_result(values)

    def _fail(self, error: Exception) -> None:
        for promise in self._promises:
            promise.set_exception(error)
