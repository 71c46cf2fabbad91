"""The thread beside the training loop."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from excite._core.background import _thread, submit


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
