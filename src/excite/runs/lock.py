"""One writer per run folder. The lock belongs to the process: when it dies, however it dies, the lock is free."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

from excite._core.files import open_regular, writing
from excite.errors import RunError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows has no flock: there, nothing keeps a second writer out
    fcntl = None

_TRIES, _PAUSE = 10, 0.02


class Lock:
    """An exclusive `flock` on `path`, taken at construction, given back by `release`."""

    def __init__(self, path: Path, run: object) -> None:
        self._descriptor: int | None = None
        # A reader that looks whether a writer lives holds the lock for a moment (see `held`): try again for 0.2 s.
        for attempt in range(_TRIES):
            self.release()
            with writing(run if isinstance(run, Path) else path):
                self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if fcntl is None:
                return
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_at(self._descriptor, path):
                    raise OSError(errno.ESTALE, "the folder was replaced meanwhile")
                return
            except OSError as error:
                if attempt == _TRIES - 1:
                    self.release()
                    raise RunError(
                        f"another process is writing to {run}: wait for it, stop it, or choose another folder"
                    ) from error
                time.sleep(_PAUSE)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one at `path` still: a lock on one that was removed or moved keeps nobody out."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def held(path: Path) -> bool:
    """Whether a living process holds the lock."""
    if fcntl is None:
        return True
    try:
        descriptor = open_regular(path, path.parent)
    except (OSError, RunError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
