"""One start of a sweep or study at a time over a store, which has no locks: a small file that is renewed while it runs."""

from __future__ import annotations

import json
import os
import platform
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from excite.errors import RunError
from excite.runs.store import Store, StoreError

_NAME = "lease.json"
_RENEWED, _VALID = 20.0, 120.0  # seconds; the difference covers clocks that differ and stores that are slow


class Lease:
    """A context in which nobody else holds the lease of `store`.

    One that was left behind ends after two minutes, or at once if its process was on this machine and is gone.
    """

    def __init__(self, store: Store) -> None:
        self.store, self._token, self._end = store, uuid.uuid4().hex, threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> Lease:
        self._check(self._read())
        self._write()
        self._check(self._read())  # of two that start at the same moment the later one holds it
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        with suppress(StoreError):
            if self._read().get("token") == self._token:
                self.store.remove(_NAME)

    def _check(self, result: dict[str, Any]) -> None:
        age = time.time() - float(result.get("time", 0.0))
        if result.get("token") in (None, self._token) or age > _VALID or _gone(result):
            return
        raise RunError(
            f"another process is writing to {self.store.url} (process {result.get('process')} on {result.get('machine')}, "
            f"{age:.0f} s ago): wait for it, stop it, or delete {_NAME} there if it is gone"
        )

    def _renew(self) -> None:
        while not self._end.wait(_RENEWED):
            with suppress(StoreError):
                self._write()

    def _write(self) -> None:
        holder = {"token": self._token, "machine": platform.node(), "process": os.getpid(), "time": time.time()}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / _NAME
            path.write_text(json.dumps(holder))
            self.store.put(path, _NAME)

    def _read(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / _NAME
            try:
                content = json.loads(path.read_text()) if self.store.fetch(_NAME, path) else {}
            except ValueError:
                content = {}
            return content if isinstance(content, dict) else {}


def _gone(holder: dict[str, Any]) -> bool:
    if holder.get("machine") != platform.node():
        return False
    try:
        os.kill(int(holder["process"]), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return False
