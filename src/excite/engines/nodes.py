"""Whether every node of a cluster can do the work: the same Python and Excite, and the place where runs are kept in sight."""

from __future__ import annotations

import platform
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from excite._version import __version__
from excite.errors import InputError
from excite.runs.copies import scratch
from excite.runs.files import writing
from excite.runs.store import Store, StoreError
from excite.work import Work


@dataclass(frozen=True)
class Mark:
    """A file where runs are kept, for nodes to look for: in a folder, or in a store."""

    folder: Path
    store: Store | None
    name: str

    @property
    def place(self) -> str:
        return str(self.folder) if self.store is None else self.store.url

    def leave(self) -> None:
        folder = self.folder if self.store is None else scratch(self.store)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / self.name).touch()
        if self.store is not None:
            self.store.put(folder / self.name, self.name)
            (folder / self.name).unlink()

    def seen(self) -> bool:
        for _ in range(20):  # shared file systems may take a moment
            try:
                if (self.folder / self.name).exists() if self.store is None else self.store.exists(self.name):
                    return True
            except (OSError, StoreError):
                pass
            time.sleep(0.1)
        return False

    def remove(self) -> None:
        if self.store is None:
            (self.folder / self.name).unlink(missing_ok=True)
        else:
            self.store.remove(self.name)


def mark_for(task: Work) -> Mark:
    store = getattr(task, "store", None)
    return Mark(task.folder.parent.resolve(), store if isinstance(store, Store) else None, f".seen-{uuid.uuid4().hex}")


@dataclass(frozen=True)
class Report:
    """What a node says of itself."""

    python: str
    excite: str
    sees: bool


def look(mark: Mark) -> Report:
    """On a node."""
    from excite._version import __version__ as version

    return Report(platform.python_version(), version, mark.seen())


def check_reports(reports: Mapping[str, Report], place: str) -> None:
    """`reports` by the name of the node."""
    here = (platform.python_version(), __version__)
    for node, report in reports.items():
        if (report.python, report.excite) != here:
            raise InputError(
                f"node {node} has Python {report.python} and Excite {report.excite}; here are {here[0]} and {here[1]}: "
                "install the same on both"
            )
        if not report.sees:
            raise InputError(
                f"node {node} does not see {place}: choose a folder on a shared file system, or a store such as s3://bucket/folder"
            )


def check_gpus(wanted: float, there: Mapping[str, float]) -> None:
    """`there`: the GPUs of each node; one piece of work runs on one node."""
    most = max(there.values(), default=0.0)
    if wanted > most:
        raise InputError(f"gpus-per-task {wanted:g}: no node of the cluster has more than {most:g} GPUs; ask for fewer")
