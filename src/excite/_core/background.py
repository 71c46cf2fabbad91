"""One background thread for work that the training loop does not wait for."""

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
    """The executor: a single thread that uses a single core.

    Its matrices are small: spread over 16 cores they took many times as long, and cores that wait for the next matrix are
    missing where the training runs.
    """
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=_NAME)
    cores = torch.get_num_threads()
    pool.submit(_take_one_core).result()
    torch.set_num_threads(cores)  # for threads that begin from now on; those that run keep theirs
    return pool


def _take_one_core() -> None:
    torch.get_num_threads()  # a thread takes over the number for all when it first looks: not after this
    torch.set_num_threads(1)


def _before_fork() -> None:
    """Waits for the thread before a fork: a child process does not have it, and its locks would never be released."""
    if _thread.cache_info().currsize and not current_thread().name.startswith(_NAME):
        with suppress(TimeoutError, RuntimeError):
            _thread().submit(lambda: None).result(timeout=5)


os.register_at_fork(before=_before_fork, after_in_child=_thread.cache_clear)


def submit(work: Callable[[], T]) -> Future[T]:
    """Runs `work` on the background thread. For work that does not touch a GPU.

    During interpreter shutdown, when threads accept no more work, it runs immediately.

    Args:
        work: Function without arguments.

    Returns:
        Future of its result.
    """
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


def submit_after_gpu(work: Callable[[], T]) -> Future[T]:
    """Runs `work` on the background thread, after everything that has been launched on the GPU so far.

    For transfers from a GPU, and for computations on the CPU while the model trains (numpy and torch release the GIL). On a
    GPU the work runs on a stream of its own, because a transfer queued behind the kernels of later steps would block the
    thread that launches them. Pass tensors that it returns through `record_stream` before using them on another stream.

    Args:
        work: Function without arguments.

    Returns:
        Future of its result.
    """
    if not torch.cuda.is_initialized():
        return submit(work)
    device = torch.cuda.current_device()
    before = torch.cuda.Event(blocking=True)
    before.record(torch.cuda.current_stream(device))

    def on_own_stream() -> T:
        before.synchronize()
        with torch.cuda.stream(_stream(device)):
            try:
                return work()
            finally:
                _stream(device).synchronize()  # so that the memory it read can be reused

    return submit(on_own_stream)


def record_stream(tensor: Tensor) -> Tensor:
    """Marks a tensor made on the background stream as used by the current stream, so that its memory is not reused too early.

    Args:
        tensor: Tensor on any device; nothing is done on the CPU.

    Returns:
        The same tensor.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def memoize(work: Callable[[], T]) -> Callable[[], T]:
    """A function that calls `work` the first time it is called, from whichever thread, and returns that result afterwards.

    Concurrent callers wait for the first. `work` and what it refers to are released after the call.
    """
    lock = Lock()
    pending, result = [work], list[T]()
    del work

    def get() -> T:
        with lock:
            if not result:
                result.append(pending[0]())
                pending.clear()
            return result[0]

    return get


def drain() -> None:
    """Waits for all submitted work. A CUDA graph cannot be captured while another thread waits for the device."""
    submit(lambda: None).result()
