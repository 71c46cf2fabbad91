"""What a node of a cluster says of itself. A module of its own: its answer need not wait for torch to be imported."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Mark(Protocol):
    """A file where runs are kept, for nodes to look for."""

    @property
    def place(self) -> str: ...
    def leave(self) -> None: ...
    def there(self) -> bool: ...
    def remove(self) -> None: ...


@dataclass(frozen=True)
class FolderMark:
    folder: Path
    name: str

    @property
    def place(self) -> str:
        return str(self.folder)

    def leave(self) -> None:
        from excite._core.files import writing

        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / self.name).touch()

    def there(self) -> bool:
        try:
            return (self.folder / self.name).exists()
        except OSError:
            return False

    def remove(self) -> None:
        (self.folder / self.name).unlink(missing_ok=True)


@dataclass(frozen=True)
class Report:
    python: str
    excite: str
    sees: bool


def look(mark: Mark) -> Report:
    """On a node."""
    from excite._version import __version__

    for _ in range(20):  # shared file systems may take a moment
        if mark.there():
            return Report(platform.python_version(), __version__, True)
        time.sleep(0.1)
    return Report(platform.python_version(), __version__, False)
