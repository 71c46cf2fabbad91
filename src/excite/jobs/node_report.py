"""Report of a node of a cluster before jobs are scheduled. Imports nothing heavy, so that the answer comes fast."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Marker(Protocol):
    """A file in the workspace; nodes that see it can run jobs."""

    @property
    def location(self) -> str:
        """Where the marker lies, for messages."""
        ...

    def create(self) -> None:
        """Creates the marker."""
        ...

    def exists(self) -> bool:
        """Whether this process sees the marker."""
        ...

    def remove(self) -> None:
        """Removes the marker."""
        ...


@dataclass(frozen=True)
class FolderMarker:
    """A marker in a folder on a shared file system."""

    folder: Path
    name: str

    @property
    def location(self) -> str:
        """Folder of the marker."""
        return str(self.folder)

    def create(self) -> None:
        """Creates the file, and its folder if needed."""
        from excite._core.files import writing

        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / self.name).touch()

    def exists(self) -> bool:
        """Whether this process sees the file."""
        try:
            return (self.folder / self.name).exists()
        except OSError:
            return False

    def remove(self) -> None:
        """Removes the file."""
        (self.folder / self.name).unlink(missing_ok=True)


@dataclass(frozen=True)
class NodeReport:
    """Versions on a node, and whether it sees the workspace."""

    python: str
    excite: str
    sees_workspace: bool


def report_node(marker: Marker) -> NodeReport:
    """Called on a node; waits up to two seconds for the marker, as shared file systems may be slow."""
    from excite._version import __version__

    for _ in range(20):
        if marker.exists():
            return NodeReport(platform.python_version(), __version__, True)
        time.sleep(0.1)
    return NodeReport(platform.python_version(), __version__, False)
