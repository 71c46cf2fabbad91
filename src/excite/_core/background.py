"""Work of probes that the training loop need not wait for: one thread beside it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from threading import Lock, current_thread
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
_NAME = "excite"


@cache
def _thread() -> ThreadPoolExecutor:
    """Its matrices are small: spread over 16 cores they took many times as long,
    and cores that wait for the next one are missing where the training runs."""
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=_NAME)
    cores = torch.get_num_threads()
    pool.submit(_take_one_core).result()
    torch.set_num_threads(cores)  # for threads that begin from now on; those that run keep theirs
    return pool


def _take_one_core() -> None:
    torch.get_num_threads()  # a thread takes over the number for all when it first looks: not after this
    torch.set_num_threads(1)


def _before_fork() -> None:
    """In a child the thread is not there: what it was doing would never be done, nor its locks let go."""
    if _thread.cache_info().currsize and not current_thread().name.startswith(_NAME):
        with suppress(TimeoutError, RuntimeError):
            _thread().submit(lambda: None).result(timeout=5)


os.register_at_fork(before=_before_fork, after_in_child=_thread.cache_clear)


def aside(work: Callable[[], T]) -> Future[T]:
    """Its result, when it is there. For what does not touch a GPU. At the very end of a program, when no thread can be given work
    any more, it is done at once."""
    try:
        return _thread().submit(work)
    except RuntimeError:
        done: Future[T] = Future()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        return done


@cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def later(work: Callable[[], T]) -> Future[T]:
    """Its result, when it is there. For what has to wait for a GPU, and for computations on the CPU while one trains: numpy and
    torch let go of Python's lock.

    On a GPU it begins when all that was asked for before is done, and on a stream of its own: to wait for a transfer behind
    the kernels of the steps to come would hold up the thread that launches them. A tensor that it leaves behind is for `handed`
    before it is used elsewhere.
    """
    if not torch.cuda.is_initialized():
        return aside(work)
    device = torch.cuda.current_device()
    before = torch.cuda.Event(blocking=True)
    before.record(torch.cuda.current_stream(device))

    def there() -> T:
        before.synchronize()
        with torch.cuda.stream(_stream(device)):
            try:
                return work()
            finally:
                _stream(device).synchronize()  # what it read may be given back now

    return aside(there)


def handed(tensor: Tensor) -> Tensor:
    """The same, made by work done later, for use here: its memory is not used again before that is done."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def once(work: Callable[[], T]) -> Callable[[], T]:
    """Does the work when it is first called, from whichever thread; others wait for it. Then only its result is kept."""
    lock = Lock()
    todo, result = [work], list[T]()
    del work

    def get() -> T:
        with lock:
            if not result:
                result.append(todo[0]())
                todo.clear()
            return result[0]

    return get


def settle() -> None:
    """Wait until all of it is done: a CUDA graph cannot be captured while another thread waits for the device."""
    aside(lambda: None).result()
