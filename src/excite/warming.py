"""Start the server of worker processes early, so that it imports torch while this process does the same."""

from __future__ import annotations

import multiprocessing
from typing import Any


def workers_context() -> Any:
    """How worker processes are made: forked by a server that has imported everything, so that a new one is there at once."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["excite.tasks"])
    return context


def warm(on: str | None, workers: int) -> None:
    """What `on` will need, begun now; imports nothing heavy."""
    if (on == "local" or (on is None and workers > 1)) and workers_context().get_start_method() == "forkserver":
        from multiprocessing import forkserver

        forkserver.ensure_running()
