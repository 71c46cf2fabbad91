"""Write files so that they either exist completely or not at all."""

from __future__ import annotations

import errno
import json
import os
import stat
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
    errno.EEXIST: "a file of that name exists and is not a directory: choose another folder",
}


@contextmanager
def writing(path: Path, error_type: type[ExciteError] = RunError) -> Iterator[None]:
    """Converts errors of the operating system to one line that says what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, error.strerror or str(error))
        raise error_type(f"cannot write {path}: {advice}") from error


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


def open_regular(path: Path, below: Path | None = None) -> int:
    """The descriptor of a regular file, open for reading. A FIFO or a device is refused without waiting for it.

    Args:
        path: The file.
        below: A folder above it. No part of the path after this folder may be a symbolic link; without it, links are followed.

    Raises:
        OSError: There is no such file, or it cannot be opened.
        RunError: It is not a regular file, or is reached through a symbolic link.
    """
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags) if below is None else _open_below(path, below, flags)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):  # a link, a socket, a folder
            raise
        raise RunError(f"{path} is not a regular file; symbolic links are not followed") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RunError(f"{path} is not a regular file")
    return descriptor


def _open_below(path: Path, below: Path, flags: int) -> int:
    """Opens one part of the path after the other, each relative to the one before: nobody can put a link in between."""
    names = path.relative_to(below).parts
    if os.open not in os.supports_dir_fd:  # Windows
        if any(below.joinpath(*names[: i + 1]).is_symlink() for i in range(len(names))):
            raise OSError(errno.ELOOP, "symbolic link")
        return os.open(path, flags)
    folder = os.open(below, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[:-1]:
            try:
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            except NotADirectoryError as error:  # what Linux says of a link to a folder
                raise OSError(errno.ELOOP, "symbolic link") from error
            os.close(folder)
            folder = inner
        return os.open(names[-1], flags | os.O_NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)


def read_json(path: Path, below: Path | None = None, max_bytes: int | None = None) -> Any:
    """The content of a regular file, see `open_regular`; one of more than `max_bytes` is refused."""
    try:
        with os.fdopen(open_regular(path, below), "rb") as file:
            content = file.read(-1 if max_bytes is None else max_bytes + 1)
    except FileNotFoundError as error:
        raise RunError(f"{path} is missing") from error
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error
    if max_bytes is not None and len(content) > max_bytes:
        raise RunError(f"{path} has more than {max_bytes:,} bytes")
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: not valid JSON ({error})") from error


def remove_temporary(folder: Path) -> None:
    """Remove what a killed writer left behind. Call only while holding the lock of the run."""
    for path in folder.glob(f"{TEMPORARY}*"):
        with suppress(OSError):
            path.unlink()
