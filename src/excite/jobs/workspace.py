"""Where the runs of a sweep or a study are: a folder, or a store such as s3://bucket/folder.

Jobs for a store run in a folder on the disk of their machine, which is copied to the store at checkpoints and at the end.
Every try begins with what the store holds, on whichever machine.
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
from excite.jobs.job import Job, JointJob
from excite.jobs.logs import append_output
from excite.jobs.progress import JobProgress, ProgressCallback, done
from excite.runs.copies import Copy, mirror, scratch
from excite.runs.lease import Lease
from excite.runs.lock import Lock
from excite.runs.store import Store, StoreError, find_store

_CHECK_INTERVAL = 0.5  # seconds between checks for a new checkpoint
_UPLOAD_FRACTION = 0.1  # of the time, what uploads during a training may take


@dataclass(frozen=True)
class StoredJob:
    """A job whose result is stored in a store.

    Args:
        inner: The job, a dataclass with a field `folder`.
        store: Where its result is stored; `folder` is this machine's copy for reading.
    """

    inner: Any
    store: Store

    @property
    def variant(self) -> str:
        """Name of the variant that is trained."""
        return str(self.inner.variant)

    @property
    def seed(self) -> int:
        """Seed of the job."""
        return int(self.inner.seed)

    @property
    def name(self) -> str:
        """Name of the job's folder in the store."""
        return str(self.inner.folder.name)

    @property
    def folder(self) -> Path:
        """Folder of the local mirror of the job's results."""
        return mirror(self.store) / self.name

    @property
    def log(self) -> str:
        """URL of the log."""
        return f"{self.store.url}/logs/{self.name}.log"

    def finished(self) -> bool:
        """Whether the store holds the complete result, which is downloaded without its checkpoints."""
        Copy(self.store, self.name, self.folder).fetch(checkpoints=False)
        return bool(self._in(self.folder).finished())

    def run(self, on_progress: ProgressCallback) -> None:
        """Downloads what the store holds, does what is left, and uploads it."""
        with self._scratch_copy() as copy:
            job = self._in(copy.folder)
            if not job.finished():
                with _uploaded(copy):
                    job.run(_UploadCheckpoints([copy], on_progress))
        on_progress(done(self.name))

    @contextmanager
    def log_to_store(self) -> Iterator[None]:
        """A context whose output is appended to the job's log in the store."""
        path, name = scratch(self.store) / "logs" / f"{self.name}.log", f"logs/{self.name}.log"
        self.store.fetch(name, path)
        try:
            with append_output(path):
                yield
        finally:
            if path.exists():
                self.store.put(path, name)
                path.unlink()

    def _in(self, folder: Path) -> Job:
        job: Job = dataclasses.replace(self.inner, folder=folder)
        return job

    @contextmanager
    def _scratch_copy(self) -> Iterator[Copy]:
        """A folder on this machine's disk with what the store holds, for one process at a time."""
        folder = scratch(self.store) / "work" / self.name
        with writing(folder):
            folder.parent.mkdir(exist_ok=True)
        lock = Lock(folder.with_name(f".{self.name}.lock"), folder)
        try:
            shutil.rmtree(folder, ignore_errors=True)  # left by a killed process
            copy = Copy(self.store, self.name, folder)
            if copy.fetch() and (folder / "run.json").exists():
                (folder / "lock").touch()  # marks a run that no process writes to
            yield copy
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()


@dataclass(frozen=True)
class StoredJointJob(StoredJob):
    """A stored job that runs at once with others of its kind."""

    def run_jointly(self, other_jobs: Sequence[StoredJob], on_progress: ProgressCallback) -> None:
        """Runs this job and others in one pass, each in a local copy that is uploaded."""
        stored = [self, *other_jobs]
        with ExitStack() as stack:
            copies = [stack.enter_context(job._scratch_copy()) for job in stored]
            jobs: list[Any] = [job._in(copy.folder) for job, copy in zip(stored, copies)]
            for copy in copies:
                stack.enter_context(_uploaded(copy))
            jobs[0].run_jointly(jobs[1:], _UploadCheckpoints(copies, on_progress))


@contextmanager
def _uploaded(copy: Copy) -> Iterator[None]:
    """Uploads the folder at the end, also after an error, which hides one of the upload."""
    try:
        yield
    except BaseException:
        try:
            copy.put()
        except StoreError as error:
            print(error)
        raise
    copy.put()


class _UploadCheckpoints:
    """Passes progress on, and uploads when there is a new checkpoint."""

    def __init__(self, copies: Sequence[Copy], on_progress: ProgressCallback) -> None:
        self.copies, self.on_progress = copies, on_progress
        self.next_check = time.monotonic() + _CHECK_INTERVAL

    def __call__(self, progress: JobProgress) -> None:
        start = time.monotonic()
        if start >= self.next_check:
            try:
                for copy in self.copies:
                    if copy.changed():
                        copy.put()
            except StoreError as error:  # the next upload includes the files of this one
                print(error, flush=True)
            now = time.monotonic()
            self.next_check = now + max(_CHECK_INTERVAL, (now - start) / _UPLOAD_FRACTION)
        if progress.status != "done":  # a job is done once it is in the store
            self.on_progress(progress)


@dataclass(frozen=True)
class Workspace:
    """Where a sweep or a study stores its runs.

    Args:
        folder: A folder of this machine; with a store, its local copy for reading.
        store: The store, if the runs are not in the folder itself.
    """

    folder: Path
    store: Store | None = None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Refuses a second process meanwhile; at the end, uploads the files beside the runs (tables, figures)."""
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        lock = Lock(self.folder / "lock", self)
        try:
            if self.store is None:
                yield
                return
            with Lease(self.store):
                yield
                self.upload(*(path.name for path in self.folder.iterdir() if path.is_file()))
        finally:
            lock.release()

    def bind(self, jobs: Sequence[Job]) -> list[Job]:
        """The jobs with their results in this workspace: unchanged for a folder, wrapped for a store."""
        if self.store is None:
            return list(jobs)
        return [(StoredJointJob if isinstance(job, JointJob) else StoredJob)(job, self.store) for job in jobs]

    def download(self, jobs: Sequence[Job]) -> None:
        """Copies the results of jobs from the store, without their checkpoints, into the folders of the jobs."""
        if self.store is not None:
            for job in jobs:
                Copy(self.store, job.folder.name, job.folder).fetch(checkpoints=False)

    def upload(self, *names: str) -> None:
        """Copies files beside the runs to the store, if there is one."""
        if self.store is not None:
            for name in names:
                if name != "lock" and not name.startswith("."):
                    self.store.put(self.folder / name, name)

    def __str__(self) -> str:
        return str(self.folder) if self.store is None else self.store.url


def find_workspace(out: object) -> Workspace:
    """The workspace at a path or a URL; a folder on a network file system is used as a store."""
    store = find_store(str(out))
    return Workspace(Path(str(out))) if store is None else Workspace(mirror(store), store)


def check_store_is_shared(job: Job) -> None:
    """Refuses a job whose store other processes do not see."""
    store = getattr(job, "store", None)
    if isinstance(store, Store) and not store.shared:
        raise InputError(
            f"{store.url} is visible to this process only: choose another --out, or --workers 1 without --on"
        )
