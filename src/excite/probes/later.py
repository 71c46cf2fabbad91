"""Work of probes that the training loop need not wait for: one thread beside it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="excite")


def later(work: Callable[[], T]) -> Future[T]:
    """Its result, when it is there. For computations on the CPU while a GPU trains: numpy and torch let go of Python's lock."""
    return _thread().submit(work)
