"""Local mirror of runs in a store for the page; changes are fetched every few seconds."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from excite.errors import ExciteError
from excite.runs.copies import local_copy
from excite.runs.store import is_url


@contextmanager
def mirrored(root: str | os.PathLike[str], pause: float = 5.0) -> Iterator[Path]:
    """A folder of this disk with the runs at `root`: itself, or for a URL a copy that is renewed while the context lasts."""
    if not is_url(root):
        yield Path(root)
        return
    folder, ended = local_copy(str(root)), threading.Event()

    def renew() -> None:
        while not ended.wait(pause):
            with suppress(ExciteError):  # the page shows what was fetched last
                local_copy(str(root))

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield folder
    finally:
        ended.set()
        thread.join()
