"""Folders at a URL: an object store (s3://, gs://, az://), a shared file system (file://), memory://, through fsspec.

A store holds whole files in the layout of the folders they come from, each written under a temporary name and then moved,
so that nobody sees half of one. Databases are never opened there: see `excite.runs.copies`.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from excite._core.files import TEMPORARY
from excite.errors import InputError, RunError

_URL = re.compile(r"[a-z][a-z0-9+.-]+://")
_NETWORK = {
    "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "panfs", "pvfs2", "smb3", "smbfs",
    "wekafs",
}  # fmt: skip


class StoreError(RunError):
    """A store that cannot be reached or written now; it may the next time."""


def is_url(path: object) -> bool:
    """Whether a path is the URL of a store."""
    return _URL.match(str(path)) is not None


def find_store(url: str | os.PathLike[str]) -> Store | None:
    """The store at a URL, or for a folder on a network file system, where SQLite is not safe; None for other folders."""
    if is_url(url):
        return Store(str(url))
    return Store(f"file://{Path(url).absolute()}") if _on_network(Path(url)) else None


class Store:
    """Files by names relative to `url`. Travels between processes as its URL; fsspec's own settings say who may enter."""

    def __init__(self, url: str) -> None:
        protocol, _, path = url.partition("://")
        if not path.strip("/"):
            raise InputError(f"{url}: expected a URL with a folder, such as s3://bucket/folder")
        self._fs, self._root = _find(f"{protocol}://{path.rstrip('/')}")
        # A relative path would be another one on other machines.
        self.url = f"file://{self._root}" if protocol in ("file", "local") else f"{protocol}://{path.rstrip('/')}"

    def __reduce__(self) -> tuple[type[Store], tuple[str]]:
        return Store, (self.url,)

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    @property
    def shared(self) -> bool:
        """Whether other processes see it."""
        return "memory" not in _protocols(self._fs)

    def list(self, name: str = "") -> dict[str, str]:
        """All files below `name`, by their names relative to it, each with a key that changes with its content."""
        base = self._path(name)
        with self._reaching():
            self._fs.invalidate_cache()
            try:
                files: Mapping[str, Any] = self._fs.find(base, detail=True)
            except FileNotFoundError:
                return {}
        listed = {path[len(base) :].lstrip("/"): _key(about) for path, about in files.items()}
        return {name: key for name, key in listed.items() if name and not _hidden(name)}

    def exists(self, name: str) -> bool:
        """Whether a file exists in the store."""
        with self._reaching():
            self._fs.invalidate_cache()
            return bool(self._fs.exists(self._path(name)))

    def fetch(self, name: str, target: Path) -> bool:
        """Copy one file to `target`, whole or not at all; False if there is none."""
        temporary = target.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        try:
            with self._reaching():
                try:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self._fs.get_file(self._path(name), str(temporary))
                except FileNotFoundError:
                    return False
                os.replace(temporary, target)
            return True
        finally:
            temporary.unlink(missing_ok=True)

    def put(self, source: Path, name: str) -> None:
        """Copy one file to `name`, whole or not at all."""
        path = self._path(name)
        parent, _, last = path.rpartition("/")
        temporary = f"{parent}/{TEMPORARY}{uuid.uuid4().hex}-{last}"
        with self._reaching():
            try:
                self._fs.makedirs(parent, exist_ok=True)
                self._fs.put_file(str(source), temporary)
                self._fs.mv(temporary, path)
            except BaseException:
                with suppress(Exception):
                    self._fs.rm_file(temporary)
                raise

    def remove(self, name: str) -> None:
        """Removes a file from the store."""
        with self._reaching(), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Errors of every kind of store in one line."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"cannot use {self.url}: {_described(error)}") from error


def _find(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        fs, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise InputError(f"{url}: {_described(error)}") from error
    except Exception as error:
        raise InputError(
            f"{url}: expected a URL that fsspec knows, such as s3://bucket/folder ({_described(error)})"
        ) from error
    return fs, str(root).rstrip("/")


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _key(about: Mapping[str, Any]) -> str:
    """Properties of a file in a listing: size, times, hashes, whichever the store has."""
    return " ".join(f"{name}={about[name]}" for name in sorted(about) if name not in ("name", "type"))


def _hidden(name: str) -> bool:
    return any(segment.startswith(".") for segment in name.split("/"))


def _described(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


def _on_network(path: Path) -> bool:
    """Whether a folder, there already or not, lies on a file system of another machine. Known on Linux only."""
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return False
    target = path.absolute()
    mounts = {line.split(" ")[1].replace("\\040", " "): line.split(" ")[2] for line in lines}
    for folder in (target, *target.parents):
        if str(folder) in mounts:
            return mounts[str(folder)] in _NETWORK
    return False
