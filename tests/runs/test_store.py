"""Stores over fsspec's local and in-memory file systems: whole files, copies that may be cut anywhere, URLs that are wrong."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from excite.errors import InputError, RunError
from excite.runs import Run, load_run
from excite.runs import store as store_module
from excite.runs.store import Store, StoreError, find_store
from runs.text_files import write


def test_files_go_there_and_come_back(store: Store, tmp_path: Path) -> None:
    assert store.list() == {}
    assert not store.fetch("a/b", tmp_path / "none")
    store.put(write(tmp_path / "one", "1"), "a/b")
    first = store.list("a")
    assert list(first) == ["b"]
    assert store.exists("a/b")
    assert pickle.loads(pickle.dumps(store)).url == store.url
    store.put(write(tmp_path / "two", "22"), "a/b")
    assert store.list("a")["b"] != first["b"]  # the key tells that it changed
    assert store.fetch("a/b", tmp_path / "back")
    assert (tmp_path / "back").read_text() == "22"
    store.remove("a/b")
    store.remove("a/b")
    assert store.list() == {}


def test_a_put_that_fails_midway_leaves_what_was_there(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(write(tmp_path / "one", "old"), "a/b")

    def half(source: str, target: str, **_: Any) -> None:
        with store._fs.open(target, "wb") as file:
            file.write(Path(source).read_bytes()[:2])
        raise OSError("the connection is gone")

    monkeypatch.setattr(store._fs, "put_file", half)
    with pytest.raises(StoreError, match=r"cannot use .*: the connection is gone"):
        store.put(write(tmp_path / "two", "newer"), "a/b")
    assert list(store.list("a")) == ["b"]
    assert store.fetch("a/b", tmp_path / "back")
    assert (tmp_path / "back").read_text() == "old"


def run_at(path: Path, steps: int) -> Run:
    run = Run.create(path, {"lr": 0.1})
    for step in range(steps):
        run.log(step, {"loss/step": 1 / (step + 1)})
    run.save_checkpoint(steps, {"weight": torch.full((3,), float(steps))})
    return run


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense://bucket/x", "expected a URL that fsspec knows"),
        ("memory://", "expected a URL with a folder"),
        ("file:///", "expected a URL with a folder"),
    ],
)
def test_urls_that_are_wrong(url: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        find_store(url)


def test_runs_that_are_not_there(store: Store, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is nothing at"):
        load_run(f"{store.url}/none")
    with pytest.raises(InputError, match="a training writes to a folder of this machine"):
        Run.create(f"{store.url}/run", {})
    with pytest.raises(InputError, match="a training writes to a folder of this machine"):
        Run.create(Path(f"{store.url}/run"), {})


def test_folders_on_network_file_systems_are_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_store(tmp_path) is None
    mounts = write(
        tmp_path / "mounts", "disk / ext4 rw 0 0\nserver:/x /shared nfs4 rw 0 0\ndisk /shared/own xfs rw 0 0\n"
    )
    real = Path
    monkeypatch.setattr(store_module, "Path", lambda path: mounts if path == "/proc/self/mounts" else real(path))
    found = find_store("/shared/runs/first")
    assert found is not None
    assert found.url == "file:///shared/runs/first"
    assert find_store("/shared/own/runs") is None
    assert find_store("/home/runs") is None
