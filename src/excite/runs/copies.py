"""A folder on this machine's disk and its copy in a store.

A copy that is cut short is as good as a process that was killed: metrics are copied before the checkpoints that need
them, files in the order in which they were written, and what says that a run is there, or done, comes last. Fetching goes
the other way. The copy of a database is made by SQLite itself, so it is of one moment, and needs no other file.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import sqlite3
import tempfile
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path

from excite._core.files import TEMPORARY, write_json, writing
from excite.errors import RunError
from excite.runs.metrics import _read_only
from excite.runs.store import Store, StoreError

Stamp = tuple[int, int]
_DATABASE = "metrics.db"
_LAST = ("run.json", "result.json")  # what marks the rest as complete
_OURS = {"lock", f"{_DATABASE}-wal", f"{_DATABASE}-shm", f"{_DATABASE}-journal"}  # of this machine only
_FETCHED = ".fetched.json"  # what the store said of each file when it was fetched


class Copy:
    """`folder` here and `name` in the store."""

    def __init__(self, store: Store, name: str, folder: Path) -> None:
        self.store, self.name, self.folder = store, name, folder
        self._sent: dict[str, Stamp] = {}

    def fetch(self, listing: Mapping[str, str] | None = None, *, checkpoints: bool = True) -> bool:
        """Make the folder what the store has (`listing`, if known); False if it has no complete run."""
        remote_files = self.store.list(self.name) if listing is None else listing
        if "run.json" not in remote_files and {_DATABASE, "config.json"} & remote_files.keys():
            remote_files = {}  # a new run whose first copy was cut short
        names = [name for name in remote_files if checkpoints or not name.startswith("checkpoints/")]
        before = _read(self.folder / _FETCHED)
        known: dict[str, str] = {}
        for name in sorted(names, key=lambda name: (name not in _LAST, name == _DATABASE, name)):
            path = self.folder / name
            if (path.is_file() and before.get(name) == remote_files[name]) or self._fetch(name, path):
                known[name] = remote_files[name]
        for name in self.stamps():
            if name not in remote_files:
                (self.folder / name).unlink(missing_ok=True)
        if known != before and self.folder.is_dir():
            write_json(self.folder / _FETCHED, known)
        if "run.json" in known:
            for folder in ("checkpoints", "artifacts"):  # stores have no empty folders
                (self.folder / folder).mkdir(exist_ok=True)
        self._sent = {name: stamp for name, stamp in self.stamps().items() if name in known}
        return bool(known)

    def _fetch(self, name: str, path: Path) -> bool:
        if name != _DATABASE:
            return self.store.fetch(self._remote_name(name), path)
        temporary = path.with_name(f"{TEMPORARY}{name}")
        try:
            if not self.store.fetch(self._remote_name(name), temporary):
                return False
            for suffix in ("-wal", "-shm"):  # of the database that was here before
                path.with_name(name + suffix).unlink(missing_ok=True)
            os.replace(temporary, path)
            return True
        finally:
            temporary.unlink(missing_ok=True)

    def changed(self) -> bool:
        """Whether there is something new beside metrics, such as a checkpoint."""
        current, sent = ({k: v for k, v in stamps.items() if k != _DATABASE} for stamps in (self.stamps(), self._sent))
        return current != sent

    def put(self) -> None:
        """Copy what is new; what is no longer here is removed there, at the end."""
        stamps = self.stamps()
        order = sorted(stamps, key=lambda name: (name in _LAST, name != _DATABASE, stamps[name], name))
        for name in order:
            if self._sent.get(name) == stamps[name]:
                continue
            path = self.folder / name
            if name == _DATABASE:
                with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=self.folder) as folder:
                    self.store.put(_snapshot(path, Path(folder) / name), self._remote_name(name))
            elif path.exists():
                self.store.put(path, self._remote_name(name))
            self._sent[name] = stamps[name]
        for name in self.store.list(self.name):
            if name not in stamps:
                self.store.remove(self._remote_name(name))
                self._sent.pop(name, None)

    def _remote_name(self, name: str) -> str:
        return f"{self.name}/{name}" if self.name else name

    def stamps(self) -> dict[str, Stamp]:
        """Time and size of every file that is copied; those of the database include its log."""
        stamps: dict[str, Stamp] = {}
        for root, folders, files in os.walk(self.folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for file in files:
                path = Path(root) / file
                name = path.relative_to(self.folder).as_posix()
                if file.startswith(".") or name in _OURS:
                    continue
                with suppress(FileNotFoundError):
                    status = path.stat()
                    stamps[name] = (status.st_mtime_ns, status.st_size)
        log = self.folder / f"{_DATABASE}-wal"
        if _DATABASE in stamps and log.exists():
            time, size = stamps[_DATABASE]
            stamps[_DATABASE] = (max(time, log.stat().st_mtime_ns), size + log.stat().st_size)
        return stamps


def local_copy(url: str, *, checkpoints: bool = False) -> Path:
    """A folder on this disk with the run, or all runs and loose files, at a URL; only what changed is fetched again."""
    store = Store(url)
    folder = scratch(store) / "seen"
    remote_files = store.list()
    if not remote_files:
        raise RunError(f"there is nothing at {url}")
    runs = [name.removesuffix("run.json").rstrip("/") for name in remote_files if name.split("/")[-1] == "run.json"]
    loose_files = dict(remote_files)
    for run in runs:
        start = f"{run}/" if run else ""
        inside = {
            name.removeprefix(start): loose_files.pop(name)
            for name in remote_files
            if name.startswith(start) and name in loose_files
        }
        Copy(store, run, folder / run).fetch(inside, checkpoints=checkpoints)
    for name in loose_files:
        if name.endswith((".json", ".md", ".log")):
            store.fetch(name, folder / name)
    return folder


def mirror(store: Store) -> Path:
    """Where the process that started a sweep or study keeps what it has fetched of it."""
    return scratch(store) / "copy"


def scratch(store: Store) -> Path:
    """This machine's own folder for a store: below what EXCITE_SCRATCH names, or the folder for temporary files."""
    base = os.environ.get("EXCITE_SCRATCH") or tempfile.gettempdir()
    own_folder = Path(base).absolute() / f"excite-{getpass.getuser()}"
    folder = own_folder / hashlib.sha256(store.url.encode()).hexdigest()[:16]
    with writing(folder):
        own_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        if hasattr(os, "getuid") and own_folder.stat().st_uid != os.getuid():
            raise RunError(f"{own_folder} belongs to somebody else: name another folder with EXCITE_SCRATCH")
    return folder


def _snapshot(database: Path, target: Path) -> Path:
    """The database of one moment in one file, also while somebody writes to it."""
    try:
        with closing(_read_only(database)) as source, closing(sqlite3.connect(target)) as copy:
            source.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")  # no log beside it
    except sqlite3.Error as error:
        raise StoreError(f"cannot copy {database}: {error}") from error
    return target


def _read(path: Path) -> dict[str, str]:
    try:
        return {str(name): str(key) for name, key in json.loads(path.read_text()).items()}
    except (OSError, ValueError, AttributeError):
        return {}
