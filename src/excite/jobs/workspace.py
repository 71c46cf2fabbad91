"""Work whose results are kept in a store: done in a folder on the worker's own disk, copied at checkpoints and at the end.

The store is the only truth: every try begins with what is there, on whichever machine.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from excite._core.files import writing
from excite.errors import InputError
from excite.jobs.job import JointWork, Tell, Work
from excite.jobs.logs import logged
from excite.runs.copies import Copy, mirror, scratch
from excite.runs.lease import Lease
from excite.runs.lock import Lock
from excite.runs.store import Store, StoreError, find_store

_LOOK, _SHARE = 0.5, 0.1  # seconds between looks for a new checkpoint; of the time, what copies while training may take


@dataclass(frozen=True)
class StoredWork:
    """`inner`, a dataclass with a folder, done for a store. `folder` is where this machine keeps the result to read it."""

    inner: Any
    store: Store

    @property
    def arm(self) -> str:
        return str(self.inner.arm)

    @property
    def seed(self) -> int:
        return int(self.inner.seed)

    @property
    def name(self) -> str:
        return str(self.inner.folder.name)

    @property
    def folder(self) -> Path:
        return mirror(self.store) / self.name

    @property
    def log(self) -> str:
        return f"{self.store.url}/logs/{self.name}.log"

    def finished(self) -> bool:
        Copy(self.store, self.name, self.folder).fetch(checkpoints=False)
        return bool(self._at(self.folder).finished())

    def perform(self, tell: Tell) -> None:
        with self._open() as copy:
            work = self._at(copy.folder)
            if not work.finished():
                with _kept(copy):
                    work.perform(_Copying([copy], tell))
        tell(self.name, "done", 1.0)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """What is printed inside goes to the end of the log in the store."""
        here, there = scratch(self.store) / "logs" / f"{self.name}.log", f"logs/{self.name}.log"
        self.store.fetch(there, here)
        try:
            with logged(here):
                yield
        finally:
            if here.exists():
                self.store.put(here, there)
                here.unlink()

    def _at(self, folder: Path) -> Work:
        work: Work = dataclasses.replace(self.inner, folder=folder)
        return work

    @contextmanager
    def _open(self) -> Iterator[Copy]:
        """A folder on this machine's disk with what the store has, for one process at a time."""
        folder = scratch(self.store) / "work" / self.name
        with writing(folder):
            folder.parent.mkdir(exist_ok=True)
        lock = Lock(folder.with_name(f".{self.name}.lock"), folder)
        try:
            shutil.rmtree(folder, ignore_errors=True)  # what a killed process left
            copy = Copy(self.store, self.name, folder)
            if copy.fetch() and (folder / "run.json").exists():
                (folder / "lock").touch()  # a run that nobody writes to now
            yield copy
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()


@dataclass(frozen=True)
class StoredJointWork(StoredWork):
    """The same for work that is done at once with other work."""

    def perform_with(self, others: Sequence[StoredWork], tell: Tell) -> None:
        parts = [self, *others]
        with ExitStack() as stack:
            copies = [stack.enter_context(part._open()) for part in parts]
            works = [part._at(copy.folder) for part, copy in zip(parts, copies)]
            for copy in copies:
                stack.enter_context(_kept(copy))
            first: Any = works[0]
            first.perform_with(works[1:], _Copying(copies, tell))


@contextmanager
def _kept(copy: Copy) -> Iterator[None]:
    """What there is at the end goes to the store, also after an error; the error matters more than one that copying adds."""
    try:
        yield
    except BaseException:
        try:
            copy.put()
        except StoreError as error:
            print(error)
        raise
    copy.put()


class _Copying:
    """Passes progress on, and copies when there is a new checkpoint."""

    def __init__(self, copies: Sequence[Copy], tell: Tell) -> None:
        self.copies, self.tell = copies, tell
        self.next = time.monotonic() + _LOOK

    def __call__(self, name: str, phase: str, share: float) -> None:
        begun = time.monotonic()
        if begun >= self.next:
            try:
                for copy in self.copies:
                    if copy.changed():
                        copy.put()
            except StoreError as error:  # the next copy holds this one's files too
                print(error, flush=True)
            now = time.monotonic()
            self.next = now + max(_LOOK, (now - begun) / _SHARE)
        if phase != "done":  # that is when it is in the store
            self.tell(name, phase, share)


@dataclass(frozen=True)
class Place:
    """Where a sweep or a study keeps its runs: `folder`, or a store, of which `folder` holds what is read here."""

    folder: Path
    store: Store | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """For one start at a time. What lies beside the runs (tables, figures) goes to the store at the end."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(self.folder / "lock", self)
        try:
            if self.store is None:
                yield
                return
            with Lease(self.store):
                yield
                self.keep(*(path.name for path in self.folder.iterdir() if path.is_file()))
        finally:
            lock.release()

    def works(self, tasks: Sequence[Work]) -> list[Work]:
        if self.store is None:
            return list(tasks)
        return [(StoredJointWork if isinstance(t, JointWork) else StoredWork)(t, self.store) for t in tasks]

    def gather(self, tasks: Sequence[Work]) -> None:
        """Fetch what there is of `tasks`, without their checkpoints."""
        if self.store is not None:
            for task in tasks:
                Copy(self.store, task.folder.name, task.folder).fetch(checkpoints=False)

    def __str__(self) -> str:
        return str(self.folder) if self.store is None else self.store.url

    def keep(self, *names: str) -> None:
        """Copy files beside the runs to the store, if there is one."""
        if self.store is not None:
            for name in names:
                if name != "lock" and not name.startswith("."):
                    self.store.put(self.folder / name, name)


def find_place(out: object) -> Place:
    """A folder, or the URL of a store."""
    store = find_store(str(out))
    return Place(Path(str(out))) if store is None else Place(mirror(store), store)


def check_shared(task: Work) -> None:
    """Refuse a store that worker processes would not see."""
    store = getattr(task, "store", None)
    if isinstance(store, Store) and not store.shared:
        raise InputError(f"{store.url} is seen by this process only: choose another place, or --workers 1 without --on")
