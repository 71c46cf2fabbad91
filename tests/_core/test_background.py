"""The thread beside the training loop."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from excite._core.background import DeferredChecks, DeviceTimer, _thread, submit
from excite.errors import InputError


def test_it_takes_one_core_and_leaves_the_others_to_the_training() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        _thread.cache_clear()
        assert submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as fresh:
            assert fresh.submit(torch.get_num_threads).result() == 3
        torch.set_num_threads(2)
        assert submit(torch.get_num_threads).result() == 1
    finally:
        torch.set_num_threads(before)


def test_it_is_one_thread_with_a_name() -> None:
    here = [submit(threading.current_thread).result() for _ in range(3)]
    assert len(set(here)) == 1
    assert here[0].name.startswith("excite")


class Slow:
    """A copy from a device that the test lets arrive."""

    here = False

    def __init__(self, numbers: Tensor):
        self._numbers = numbers

    def ready(self) -> bool:
        return Slow.here

    def read(self) -> list[Any]:
        return self._numbers.tolist()  # type: ignore[no-any-return]


def negative(numbers: list[float]) -> str | None:
    return "expected positive numbers" if min(numbers) < 0 else None


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> DeferredChecks:
    monkeypatch.setattr(Slow, "here", False)
    return DeferredChecks("loss", defers=lambda tensor: True, copy=Slow)  # type: ignore[arg-type]


def test_a_check_on_the_cpu_raises_at_once() -> None:
    checks = DeferredChecks("loss")
    checks.begin(torch.zeros(1))
    checks.add(torch.tensor([1.0]), negative)
    with pytest.raises(InputError, match=r"^expected positive numbers$"):
        checks.add(torch.tensor([-1.0]), negative)
    checks.finish()


def test_what_has_not_arrived_is_not_waited_for(later: DeferredChecks, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1.0, -1.0, 1.0):
        later.begin(torch.zeros(1))
        later.add(torch.tensor([number]), negative)
    later.begin(torch.zeros(1))
    monkeypatch.setattr(Slow, "here", True)
    with pytest.raises(InputError, match=r"^expected positive numbers \(in call 2 of loss, 3 calls ago.*checkpoint"):
        later.begin(torch.zeros(1))
    later.begin(torch.zeros(1))  # said once
    later.finish()


def test_finish_waits(later: DeferredChecks) -> None:
    later.begin(torch.zeros(1))
    later.add(torch.tensor([-1.0]), negative)
    with pytest.raises(InputError, match="in call 1 of loss, 0 calls ago"):
        later.finish()
    later.finish()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda checks: pickle.loads(pickle.dumps(checks))])
def test_a_copy_has_no_calls_to_judge(later: DeferredChecks, copied: Any) -> None:
    later.begin(torch.zeros(1))
    later.add(torch.tensor([-1.0]), negative)
    copied(later).finish()
    with pytest.raises(InputError):
        later.finish()


class Queue:
    """A pretended GPU: kernels take time one after the other, the host launches them ahead."""

    def __init__(self):
        self.host = self.device = 0.0

    def launch(self, seconds):
        self.device = max(self.host, self.device) + seconds

    def event(self):
        queue = self

        class Event:
            def record(self, stream):
                queue.launch(0.0)
                self.at = queue.device

            def query(self):
                return queue.host >= self.at

            def elapsed_time(self, other):
                return 1000 * (other.at - self.at)

        return Event()


def test_a_busy_gpu_is_delayed_by_kernels_not_by_the_host():
    gpu = Queue()
    timer = DeviceTimer(torch.device("cpu"), gpu.event)
    for _ in range(10):
        gpu.launch(1.0)  # a training step; the host does not wait
        started = timer.start()
        gpu.host += 0.9  # such as waiting for room in the launch queue
        gpu.launch(0.01)
        timer.stop(started)
    assert timer.seconds < 0.1  # what the GPU has not come to does not count
    gpu.host = gpu.device
    assert timer.seconds == pytest.approx(0.1)
    assert len(timer._spare) <= 20


def test_a_gpu_that_waits_is_delayed_by_the_host():
    gpu = Queue()
    timer = DeviceTimer(torch.device("cpu"), gpu.event)
    for _ in range(10):
        gpu.launch(0.1)
        gpu.host = gpu.device + 1.0  # the GPU is idle
        started = timer.start()
        gpu.host += 0.9
        gpu.launch(0.01)
        timer.stop(started)
    gpu.host = gpu.device
    assert timer.seconds == pytest.approx(10 * 0.91)
