"""Whether every node of a cluster can do the work: the same Python and Excite, and the place where runs are kept in sight."""

from __future__ import annotations

import platform
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from excite._version import __version__
from excite.errors import InputError
from excite.jobs.job import Work
from excite.jobs.node_report import FolderMark, Mark, Report
from excite.runs.copies import scratch
from excite.runs.store import Store, StoreError


@dataclass(frozen=True)
class StoreMark:
    """A file in a store, for nodes to look for."""

    store: Store
    name: str

    @property
    def place(self) -> str:
        return self.store.url

    def leave(self) -> None:
        path = scratch(self.store) / self.name
        path.touch()
        try:
            self.store.put(path, self.name)
        finally:
            path.unlink()

    def there(self) -> bool:
        try:
            return self.store.exists(self.name)
        except StoreError:
            return False

    def remove(self) -> None:
        self.store.remove(self.name)


def mark_for(task: Work) -> Mark:
    store, name = getattr(task, "store", None), f".seen-{uuid.uuid4().hex}"
    return StoreMark(store, name) if isinstance(store, Store) else FolderMark(task.folder.parent.resolve(), name)


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
        many = f"{most:g} GPU{'s' * (most != 1)}"
        raise InputError(f"gpus-per-task {wanted:g}: no node of the cluster has more than {many}; ask for fewer")
