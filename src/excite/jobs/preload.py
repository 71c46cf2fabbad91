"""Starts the server of worker processes early, so that it imports torch while this process does the same."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from typing import Any


def worker_context() -> Any:
    """The multiprocessing context of worker processes: forked by a server that has imported everything."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["excite.jobs.scheduler"])
    _start_server()
    return context


def _start_server() -> None:
    """Starts the server with Ctrl-C ignored, which reaches every process of the terminal, also while it imports."""
    from multiprocessing import forkserver

    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def preload(on: str | None, workers: int) -> None:
    """Starts what the executor `on` will need; imports nothing heavy."""
    if on == "local" or (on is None and workers > 1):
        worker_context()
