"""The server of worker processes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from excite.jobs.preload import worker_context


@pytest.mark.slow
def test_preloading_imports_nothing_heavy_here() -> None:
    code = (
        "import sys; from excite.jobs.preload import preload; preload('local', 2); preload(None, 1); preload('ray', 2)\n"
        "print('torch' in sys.modules)"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout == "False\n"


def test_the_handler_of_interrupts_is_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    context = worker_context()
    assert context.get_start_method() in ("forkserver", "spawn")
    assert signal.getsignal(signal.SIGINT) is before
