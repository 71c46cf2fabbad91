"""One writer per run folder. The operating system frees the lock when its process ends, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from excite._core.files import open_regular, writing
from excite.errors import RunError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_TRIES, _PAUSE = 10, 0.02
# Windows refuses to read the locked byte, which is the first one: the holder is written behind it.
_OFFSET, _LONGEST = 1, 1000


class Lock:
    """An exclusive lock on a file, acquired at construction.

    The file names the process that holds the lock.

    Args:
        path: Lock file; created if it does not exist.
        run: What the lock protects, for the error message.

    Raises:
        RunError: If another process holds the lock.
    """

    def __init__(self, path: Path, run: object) -> None:
        self._descriptor: int | None = None
        # `held` takes the lock for a moment: try again for 0.2 s.
        for attempt in range(_TRIES):
            with writing(run if isinstance(run, Path) else path):
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
                try:
                    locked = lock_descriptor(self._descriptor, blocking=False)
                except OSError:
                    self._close()
                    raise
            if locked and _is_at(self._descriptor, path):
                _write_holder(self._descriptor)
                return
            holder = _read_holder(self._descriptor)
            self._close()
            if attempt < _TRIES - 1:
                time.sleep(_PAUSE)
        by = f" (process {holder['process']} on {holder['machine']})" if holder else ""
        raise RunError(f"another process is writing to {run}{by}: wait for it, stop it, or choose another folder")

    def release(self) -> None:
        """Frees the lock. Releasing twice does nothing."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)  # a run that is passed on names no machine
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_held(path: Path) -> bool:
    """Returns whether a running process holds the lock at `path`."""
    try:
        descriptor = open_regular(path, path.parent)
    except (OSError, RunError):
        return False
    try:
        return not _lock_shared(descriptor)
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _lock_shared(descriptor: int) -> bool:
    """A shared lock: readers that check at the same time do not exclude each other, and NFS grants it to readers."""
    if fcntl is None:
        return lock_descriptor(descriptor, blocking=False)
    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`: a lock on one that was removed or moved excludes nobody."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _write_holder(descriptor: int) -> None:
    text = "\n" + json.dumps({"process": os.getpid(), "machine": platform.node()})
    with contextlib.suppress(OSError):  # a full disk keeps nobody from locking
        os.ftruncate(descriptor, 0)
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.write(descriptor, text.encode())


def _read_holder(descriptor: int) -> dict[str, Any] | None:
    """Returns process and machine of the last holder; None if unknown, as in files of earlier versions."""
    try:
        os.lseek(descriptor, _OFFSET, os.SEEK_SET)
        holder = json.loads(os.read(descriptor, _LONGEST))
    except (OSError, ValueError):
        return None
    return holder if isinstance(holder, dict) and {"process", "machine"} <= holder.keys() else None
