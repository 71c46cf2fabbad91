"""Stores for the tests of runs, in a folder and in memory."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from excite.runs.store import Store


@pytest.fixture(params=["file", "memory"])
def store(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty store on each of fsspec's local and in-memory file systems."""
    monkeypatch.setenv("EXCITE_SCRATCH", str(tmp_path / "scratch"))
    if request.param == "file":
        yield Store(f"file://{tmp_path}/store")
    else:
        yield Store(f"memory://{uuid.uuid4().hex}")
        fsspec.filesystem("memory").store.clear()
