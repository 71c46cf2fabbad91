"""Work that the training loop does not wait for: one background thread, and checks of values on a GPU."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from threading import Lock, current_thread
from typing import Any, TypeVar

import torch
from torch import Tensor

from excite._core.preserve import capturing
from excite.errors import InputError

T = TypeVar("T")
Judge = Callable[[list[Any]], str | None]  # numbers -> what is wrong with them in one line; None if nothing is
_NAME = "excite"


@cache
def _thread() -> ThreadPoolExecutor:
    """The executor: a single thread that uses a single core.

    Its matrices are small: spread over 16 cores they took many times as long, and cores that wait for the next matrix are
    missing where the training runs.
    """
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=_NAME)
    cores = torch.get_num_threads()
    pool.submit(_use_one_core).result()
    torch.set_num_threads(cores)  # for threads that begin from now on; those that run keep theirs
    return pool


def _use_one_core() -> None:
    torch.get_num_threads()  # a thread takes over the number for all when it first reads it: not after this
    torch.set_num_threads(1)


def _before_fork() -> None:
    """Waits for the thread before a fork: a child process does not have it, and its locks would never be released."""
    if _thread.cache_info().currsize and not current_thread().name.startswith(_NAME):
        with suppress(TimeoutError, RuntimeError):
            _thread().submit(lambda: None).result(timeout=5)


os.register_at_fork(before=_before_fork, after_in_child=_thread.cache_clear)


def submit(function: Callable[[], T]) -> Future[T]:
    """Runs `function` on the background thread. For work that does not touch a GPU.

    During interpreter shutdown, when threads accept no more work, it runs immediately.

    Args:
        function: Function without arguments.

    Returns:
        Future of its result.
    """
    try:
        return _thread().submit(function)
    except RuntimeError:
        done: Future[T] = Future()
        try:
            done.set_result(function())
        except Exception as error:
            done.set_exception(error)
        return done


@cache
def _stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def submit_after_gpu(function: Callable[[], T]) -> Future[T]:
    """Runs `function` on the background thread, after everything that has been launched on the GPU so far.

    For transfers from a GPU, and for computations on the CPU while the model trains (numpy and torch release the GIL). On a
    GPU the work runs on a stream of its own, because a transfer queued behind the kernels of later steps would block the
    thread that launches them. Pass tensors that it returns through `record_stream` before using them on another stream.

    Args:
        function: Function without arguments.

    Returns:
        Future of its result.
    """
    if not torch.cuda.is_initialized():
        return submit(function)
    device = torch.cuda.current_device()
    before = torch.cuda.Event(blocking=True)
    before.record(torch.cuda.current_stream(device))

    def on_own_stream() -> T:
        before.synchronize()
        with torch.cuda.stream(_stream(device)):
            try:
                return function()
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


def memoize(function: Callable[[], T]) -> Callable[[], T]:
    """A function that calls `function` the first time it is called, from whichever thread, and returns that result afterwards.

    Concurrent callers wait for the first. `function` and what it refers to are released after the call.
    """
    lock = Lock()
    pending, result = [function], list[T]()
    del function

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


def runs_ahead(tensor: Tensor) -> bool:
    """Whether the host runs ahead of the device of this tensor, so that reading a value would make it wait."""
    return tensor.is_cuda and not torch.compiler.is_compiling()


class HostCopy:
    """A few numbers on their way from a GPU to pinned memory, behind what has been launched so far."""

    def __init__(self, numbers: Tensor):
        self._numbers = numbers.detach().to("cpu", non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(numbers.device))

    def ready(self) -> bool:
        """Whether the numbers can be read without waiting."""
        return bool(self._event.query())

    def read(self) -> list[Any]:
        """The numbers; waits for them."""
        self._event.synchronize()
        numbers: list[Any] = self._numbers.tolist()
        return numbers


class DeviceTimer:
    """By how many seconds sections of host code delay what a GPU computes, without waiting for it.

    An event at each end of a section. While the host runs ahead, the time between the two is that of the kernels that the section
    launched, however long the host waited for space in the launch queue; where the GPU waits for the host, it is the host's time.
    Kernels on other streams are not counted.

    Args:
        device: The GPU.
        event: Makes an event that keeps its time; the default is CUDA's.
    """

    def __init__(self, device: torch.device, event: Callable[[], Any] | None = None):
        self._device = device
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))
        self._spare: list[Any] = []
        self._pending: deque[tuple[Any, Any]] = deque()
        self._seconds = 0.0

    def start(self) -> Any:
        """Begins a section; returns what `stop` takes."""
        self._collect()
        return self._record()

    def stop(self, started: Any) -> None:
        """Ends a section."""
        self._pending.append((started, self._record()))

    @property
    def seconds(self) -> float:
        """Total of the sections that the GPU has completed."""
        self._collect()
        return self._seconds

    def _record(self) -> Any:
        event = self._spare.pop() if self._spare else self._event()
        event.record(torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None)
        return event

    def _collect(self) -> None:
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            self._seconds += first.elapsed_time(last) / 1000
            self._spare += [first, last]


class DeferredChecks:
    """Checks of the inputs of a function that is called at every training step, without waiting for a GPU.

    On the CPU a check raises at once. On a GPU the numbers that it judges are copied asynchronously, and are judged in the
    first later call by which they are ready: the error then names the call it belongs to.

    Args:
        name: Name of the function, for the error.
        defers: Whether numbers on the device of a tensor are judged later.
        copy: Begins the copy of the numbers to the host.
    """

    def __init__(
        self, name: str, defers: Callable[[Tensor], bool] = runs_ahead, copy: Callable[[Tensor], HostCopy] = HostCopy
    ):
        self.defers = defers
        self._name, self._copy, self._calls = name, copy, 0
        self._pending: deque[tuple[int, HostCopy, Judge]] = deque()

    def begin(self, tensor: Tensor) -> DeferredChecks | None:
        """Counts a call, and raises what was found wrong with earlier ones. Never waits.

        Args:
            tensor: An input of the call.

        Returns:
            These checks, if they are judged later for inputs on the device of the tensor; None if they need not be, or while
            a CUDA graph is captured.
        """
        if tensor.is_cuda and capturing():
            return None
        self._calls += 1
        while self._pending and self._pending[0][1].ready():
            self._judge_first()
        return self if self.defers(tensor) else None

    def add(self, numbers: Tensor, judge: Judge) -> None:
        """Judges numbers of the current call: now where they can be read, otherwise when they have arrived.

        Args:
            numbers: Tensor of one axis.
            judge: Returns what is wrong with them, or None.

        Raises:
            InputError: If the numbers can be read, and something is wrong with them.
        """
        if self.defers(numbers):
            self._pending.append((self._calls, self._copy(numbers), judge))
        elif (problem := judge(numbers.tolist())) is not None:
            raise InputError(problem)

    def finish(self) -> None:
        """Waits for all numbers, and raises what was found wrong."""
        while self._pending:
            self._judge_first()

    def _judge_first(self) -> None:
        call, numbers, judge = self._pending.popleft()
        if (problem := judge(numbers.read())) is not None:
            raise InputError(
                f"{problem} (in call {call} of {self._name}, {self._calls - call} calls ago: a GPU is not waited for); "
                "load a checkpoint from before it, since weights may have been updated with this batch"
            )

    def __reduce__(self) -> tuple[type[DeferredChecks], tuple[str]]:
        return DeferredChecks, (self._name,)  # copies have calls of their own
