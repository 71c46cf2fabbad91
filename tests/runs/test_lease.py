"""One holder of a store's lease at a time."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from excite.errors import RunError
from excite.runs.lease import Lease
from excite.runs.store import Store


@pytest.fixture(params=["file", "memory"])
def store(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("EXCITE_SCRATCH", str(tmp_path / "scratch"))
    if request.param == "file":
        yield Store(f"file://{tmp_path}/store")
    else:
        yield Store(f"memory://{uuid.uuid4().hex}")
        fsspec.filesystem("memory").store.clear()


def test_a_second_holder_of_a_lease_is_refused(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Lease(store):
        with pytest.raises(RunError, match=r"another process is writing to .* s ago\): wait for it"), Lease(store):
            pass
        assert store.exists("lease.json")
    assert not store.exists("lease.json")
    left = Lease(store)
    left._write()  # by one that was killed
    with pytest.raises(RunError, match="another process"), Lease(store):
        pass
    monkeypatch.setattr("excite.runs.lease.os.kill", lambda *_: (_ for _ in ()).throw(ProcessLookupError))
    with Lease(store):
        pass
