"""Download, verify, cache. A file that exists with the right hash is used without a network."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from excite._core.checks import check_path
from excite._core.files import writing
from excite._core.progress import Progress
from excite.data.sources import SOURCES, Archive, File, Source
from excite.data.unpacking import CHUNK, unpack
from excite.errors import DataError, InputError


def cache_folder(root: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder of downloaded datasets.

    Args:
        root: Folder to use instead of the default.

    Returns:
        `root`, else the folder that the environment variable EXCITE_DATA names, else the platform's cache folder
        (``~/.cache/excite`` on Linux).

    Raises:
        InputError: If `root` is not a path.

    Example:
        >>> from excite.data import cache_folder
        >>> cache_folder("data").name
        'data'
    """
    if root is not None:
        return check_path(root, "root")
    if named := os.environ.get("EXCITE_DATA"):
        return Path(named).expanduser()
    import pooch

    folder = Path(pooch.os_cache("excite"))
    if sys.platform == "win32" and not folder.is_dir():  # data of earlier versions
        earlier = Path(os.environ.get("LOCALAPPDATA") or Path.home()) / "excite" / "Cache"
        return earlier if earlier.is_dir() else folder
    return folder


def fetch(name: str, root: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """Downloads the files of a set that are not in the cache folder, and verifies their SHA-256.

    Args:
        name: "cifar10", "mnist" or "fashion-mnist".
        root: Folder to use instead of the default (see `cache_folder`).
        progress: Called as `progress(phase, bytes_done, bytes_total)` during a download.

    Returns:
        The folder of the files.

    Raises:
        InputError: If the set is not downloaded but built in.
        DataError: If a file cannot be downloaded or written, or does not have the expected SHA-256.

    Example:
        >>> from excite.data import fetch
        >>> fetch("mnist")  # downloads 11 MB  # doctest: +SKIP
    """
    if name not in SOURCES:
        raise InputError(
            f"{name!r} is not downloaded: expected one of {', '.join(SOURCES)}; all other sets are built in"
        )
    return fetch_source(SOURCES[name], cache_folder(root), progress)


def fetch_source(source: Source, root: Path, progress: Progress | None = None) -> Path:
    """Downloads what is missing of a source, below the folder `root`."""
    folder = root / source.folder
    for archive in source.archives:
        if all(is_right(folder / file.name, file) for file in archive.files):
            continue
        # An archive put there by hand serves as well as a download.
        if by_hand := _find_archive(archive, folder, root):
            unpack(by_hand, archive, folder)
        else:
            with writing(folder, DataError):
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder) as temporary:
                    unpack(_download(archive, Path(temporary), folder, progress), archive, folder)
    return folder


def read(source: Source, file: File, root: Path) -> bytes:
    """Returns the bytes of a cached file, verified: what is returned is what was hashed."""
    path = root / source.folder / file.name
    get = f"run `excite data fetch {source.name}`"
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(
            f"{source.name} is not in {root}: {get}, or set EXCITE_DATA to the folder that has it"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise DataError(f"{path} does not have the expected SHA-256: {get} to replace it")
    return content


def is_right(path: Path, file: File) -> bool:
    """Whether the file has the expected size and SHA-256."""
    try:
        return path.stat().st_size == file.size and _sha256(path) == file.sha256
    except OSError:
        return False


def _sha256(path: Path) -> str:
    hasher = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


def _find_archive(archive: Archive, folder: Path, root: Path) -> Path | None:
    """The archive in the folder of the set or in the root; archives of other sets may have the same name."""
    others = {other.sha256 for source in SOURCES.values() for other in source.archives}
    for path in (folder / archive.name, root / archive.name):
        if not path.is_file():
            continue
        try:
            digest = _sha256(path)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from error
        if digest == archive.sha256:
            return path
        if digest not in others:
            raise DataError(f"{path} does not have the expected SHA-256: delete it and get it again from {archive.url}")
    return None


def _download(archive: Archive, temporary: Path, folder: Path, progress: Progress | None) -> Path:
    import pooch

    bar: Any = _Bar(f"downloading {archive.name}", progress) if progress else False
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        downloader = pooch.HTTPDownloader(progressbar=bar, timeout=30)
        return Path(
            pooch.retrieve(archive.url, f"sha256:{archive.sha256}", archive.name, temporary, downloader=downloader)
        )
    except ValueError as error:
        if "hash" not in str(error):
            raise DataError(_unreachable(archive, folder, error)) from error
        raise DataError(
            f"what {archive.url} sent does not have the expected SHA-256 and was thrown away: try again later"
        ) from error
    except OSError as error:  # the errors of requests are OSErrors too
        if type(error).__module__ == "builtins" and error.errno is not None:
            with writing(folder, DataError):
                raise
        raise DataError(_unreachable(archive, folder, error)) from error
    except Exception as error:
        # urllib3 raises errors of its own kind when a connection breaks in the middle of the body.
        raise DataError(_unreachable(archive, folder, error)) from error
    finally:
        logger.setLevel(level)


def _unreachable(archive: Archive, folder: Path, error: Exception) -> str:
    return (
        f"cannot download {archive.url} ({type(error).__name__}): check the network, or put {archive.name} into {folder} by "
        "hand (in the folder that EXCITE_DATA names) and run this again"
    )


class _Bar:
    """Progress bar for pooch that calls `progress(phase, done, total)`."""

    def __init__(self, phase: str, progress: Progress) -> None:
        self._phase, self._progress = phase, progress
        self.total, self._done = 0, 0

    def update(self, n: int) -> None:
        self._done += n  # pooch counts whole chunks: the last one may go past the end
        self._progress(self._phase, min(self._done, self.total or self._done), self.total or self._done)

    def reset(self) -> None:
        # pooch resets the bar at the end and then fills it again, to show a full bar.
        self._done = 0

    def close(self) -> None:
        pass
