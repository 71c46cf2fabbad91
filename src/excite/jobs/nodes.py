"""Checks of a cluster before jobs are scheduled: same Python and Excite on all nodes, workspace visible, enough GPUs."""

from __future__ import annotations

import platform
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from excite._version import __version__
from excite.errors import InputError
from excite.jobs.job import Job
from excite.jobs.node_report import FolderMarker, Marker, NodeReport
from excite.runs.copies import scratch
from excite.runs.store import Store, StoreError


@dataclass(frozen=True)
class StoreMarker:
    """A marker in a store."""

    store: Store
    name: str

    @property
    def location(self) -> str:
        """URL of the store."""
        return self.store.url

    def create(self) -> None:
        """Uploads an empty object."""
        path = scratch(self.store) / self.name
        path.touch()
        try:
            self.store.put(path, self.name)
        finally:
            path.unlink()

    def exists(self) -> bool:
        """Whether this process sees the object."""
        try:
            return self.store.exists(self.name)
        except StoreError:
            return False

    def remove(self) -> None:
        """Removes the object."""
        self.store.remove(self.name)


def marker_for(job: Job) -> Marker:
    """A marker beside the result of a job; not created yet."""
    store, name = getattr(job, "store", None), f".seen-{uuid.uuid4().hex}"
    return StoreMarker(store, name) if isinstance(store, Store) else FolderMarker(job.folder.parent.resolve(), name)


def check_reports(reports: Mapping[str, NodeReport], location: str) -> None:
    """Refuses a cluster with a node of another Python or Excite, or one that does not see the workspace.

    Args:
        reports: By the name of the node.
        location: Folder or URL of the workspace.
    """
    own = (platform.python_version(), __version__)
    for node, report in reports.items():
        if (report.python, report.excite) != own:
            raise InputError(
                f"node {node} has Python {report.python} and Excite {report.excite}, this machine {own[0]} and {own[1]}: "
                "install the same versions on both"
            )
        if not report.sees_workspace:
            raise InputError(
                f"node {node} does not see {location}: choose a folder on a shared file system, or a store such as "
                "s3://bucket/folder"
            )


def check_gpus(gpus_per_job: float, gpus_by_node: Mapping[str, float]) -> None:
    """Refuses jobs that need more GPUs than any one node has."""
    largest = max(gpus_by_node.values(), default=0.0)
    if gpus_per_job > largest:
        count = f"{largest:g} GPU{'s' * (largest != 1)}"
        raise InputError(f"gpus-per-job {gpus_per_job:g}: no node of the cluster has more than {count}; request fewer")
