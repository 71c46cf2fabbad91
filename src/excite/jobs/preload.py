"""Start the server of worker processes early, so that it imports torch while this process does the same."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from typing import Any


def workers_context() -> Any:
    """How worker processes are made: forked by a server that has imported everything, so that a new one is there at once."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["excite.jobs.scheduler"])
    _start()
    return context


def _start() -> None:
    """The server is not to act on Ctrl-C, which reaches every process of the terminal: also not while it imports."""
    from multiprocessing import forkserver

    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def warm(on: str | None, workers: int) -> None:
    """What `on` will need, begun now; imports nothing heavy."""
    if on == "local" or (on is None and workers > 1):
        workers_context()
