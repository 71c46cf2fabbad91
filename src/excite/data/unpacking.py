"""Unpack a downloaded archive without trusting it.

Only members with an expected name are read; they must be regular files of the expected size, and they are copied out
under our own names and checked by hash before they are moved into place. No path from the archive is ever used.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from excite._core.files import sync_folder, writing
from excite.data.sources import Archive, File
from excite.errors import DataError

CHUNK = 1 << 20
MAX_MEMBERS, MAX_BYTES = 1000, 1 << 30  # of an archive, also of members that are passed over


def unpack(path: Path, archive: Archive, folder: Path) -> None:
    """Put the archive's files into `folder`: all of them, or none and a DataError."""
    with writing(folder, DataError):
        folder.mkdir(parents=True, exist_ok=True)
    copied: list[tuple[str, Path]] = []
    try:
        with _readable(path):
            if archive.name.endswith(".tar.gz"):
                _unpack_tar(path, archive, folder, copied)
            else:
                with gzip.open(path) as stream:
                    _copy(stream, archive.files[0], folder, copied, path)
        with writing(folder, DataError):
            for temporary, target in copied:
                os.replace(temporary, target)
        sync_folder(folder)
    finally:
        for temporary, _ in copied:
            with suppress(OSError):
                os.unlink(temporary)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path.name} is truncated or damaged ({error}): delete it and fetch again") from error


def _unpack_tar(path: Path, archive: Archive, folder: Path, copied: list[tuple[str, Path]]) -> None:
    expected = {archive.prefix + file.name: file for file in archive.files}
    passed = 0
    # The stream mode reads forward only: no member can send us anywhere else in the file.
    with tarfile.open(path, "r|gz") as tar:
        for number, member in enumerate(tar):
            passed += max(member.size, 0)
            if number >= MAX_MEMBERS or passed > MAX_BYTES:
                raise DataError(f"{path.name} is larger than it should be: it is not the published archive")
            file = expected.pop(member.name, None)
            if file is None:
                if any(member.name == archive.prefix + f.name for f in archive.files):
                    raise DataError(f"{path.name} holds {member.name!r} twice: it is not the published archive")
                continue
            if not member.isreg():
                raise DataError(
                    f"{path.name} holds {member.name!r}, but not as a regular file: it is not the published archive"
                )
            stream = tar.extractfile(member)
            if member.size != file.size or stream is None:
                raise DataError(f"{path.name}: {member.name!r} has {member.size} bytes instead of {file.size}")
            _copy(stream, file, folder, copied, path)
    if expected:
        raise DataError(f"{path.name} does not hold {next(iter(expected))!r}: it is truncated or another archive")


def _copy(
    stream: IO[bytes] | gzip.GzipFile, file: File, folder: Path, copied: list[tuple[str, Path]], path: Path
) -> None:
    """Copy one file out under a temporary name, reading no more than it should have."""
    with writing(folder, DataError):
        descriptor, temporary = tempfile.mkstemp(prefix=".tmp-", dir=folder)
    copied.append((temporary, folder / file.name))
    hasher, size = hashlib.sha256(), 0
    with os.fdopen(descriptor, "wb") as target:
        while chunk := stream.read(CHUNK):
            size += len(chunk)
            if size > file.size:
                raise DataError(
                    f"{path.name}: {file.name} is longer than {file.size} bytes: it is not the published file"
                )
            hasher.update(chunk)
            with writing(folder / file.name, DataError):
                target.write(chunk)
        with writing(folder / file.name, DataError):
            target.flush()
            os.fsync(target.fileno())
    if size != file.size or hasher.hexdigest() != file.sha256:
        raise DataError(
            f"{path.name}: {file.name} does not have the expected SHA-256: delete {path.name} and fetch again"
        )
    with writing(folder, DataError):
        os.chmod(temporary, 0o644)
