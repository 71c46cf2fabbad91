"""Write files so that they are either there, whole, or not there at all."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from excite.errors import ExciteError, InputError, RunError

TEMPORARY = ".tmp-"
_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space and start again",
    errno.EDQUOT: "the disk quota is used up: free some space and start again",
    errno.EFBIG: "the file would be larger than allowed: free some space or raise the limit",
    errno.EROFS: "the disk is read-only: choose another folder",
    errno.EACCES: "permission denied: choose a folder you can write to",
    errno.EPERM: "permission denied: choose a folder you can write to",
    errno.ENOTDIR: "a part of the path is a file, not a folder: choose another folder",
    errno.EEXIST: "a file of that name is in the way: choose another folder",
}


@contextmanager
def writing(path: Path, kind: type[ExciteError] = RunError) -> Iterator[None]:
    """Turn the errors of the operating system into one line that says what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, error.strerror or str(error))
        raise kind(f"cannot write {path}: {advice}") from error


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut, where the platform can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Atomic: a temporary file beside `path`, flushed to the disk, then renamed over it."""
    with writing(path):
        descriptor, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    sync_folder(path.parent)


def _umask() -> int:
    # There is no way to read the mask without setting it. mkstemp makes private files; a run is shared like any other.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def write_json(path: Path, value: Any) -> None:
    """NaN and infinities are written as Python's json does (NaN, Infinity) and come back as they were."""
    try:
        text = json.dumps(value, indent=2)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{path.name}: cannot be written as JSON: {error}") from error
    write_bytes(path, (text + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"{path} is missing") from error
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: not valid JSON ({error})") from error


def remove_temporary(folder: Path) -> None:
    """Remove what a killed writer left behind. Call only while holding the lock of the run."""
    for path in folder.glob(f"{TEMPORARY}*"):
        with suppress(OSError):
            path.unlink()
