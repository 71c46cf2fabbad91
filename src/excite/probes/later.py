"""Work of probes that the training loop need not wait for: one thread beside it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from threading import Lock
from typing import TypeVar

import torch

T = TypeVar("T")


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="excite")


def later(work: Callable[[], T]) -> Future[T]:
    """Its result, when it is there. For what has to wait for a GPU, and for computations on the CPU while one trains: numpy and
    torch let go of Python's lock. Kernels go to the stream that is current here, behind those that are there already."""
    if not torch.cuda.is_initialized():
        return _thread().submit(work)
    stream = torch.cuda.current_stream()

    def there() -> T:
        with torch.cuda.stream(stream):
            return work()

    return _thread().submit(there)


def once(work: Callable[[], T]) -> Callable[[], T]:
    """Does the work when it is first called, from whichever thread; others wait for it."""
    lock = Lock()
    result: list[T] = []

    def get() -> T:
        with lock:
            if not result:
                result.append(work())
            return result[0]

    return get


def settle() -> None:
    """Wait until all of it is done: a CUDA graph cannot be captured while another thread waits for the device."""
    _thread().submit(lambda: None).result()
