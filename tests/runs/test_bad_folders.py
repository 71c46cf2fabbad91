"""Foreign, missing, damaged and unwritable run folders: one RunError each, in one line, and nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch

from excite.errors import RunError
from excite.runs import Run, checkpoints, folder, load_run, metrics, repair
from excite.runs.reader import metrics_reader, read_status


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Run.create(tmp_path / "run", {"a": 1}) as run:
        for step in range(300):
            run.log(step, {"a/b": float(step), "a/c": 1.0})
    return tmp_path / "run"


def one_line(error: pytest.ExceptionInfo[RunError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def refused(path: Path, match: str) -> None:
    for mode in ("r", "a"):
        with pytest.raises(RunError, match=match) as error:
            Run.open(path, mode)  # type: ignore[arg-type]
        one_line(error)


def test_missing_foreign_and_wrong_kinds(tmp_path: Path) -> None:
    refused(tmp_path / "none", "no run folder")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "it is a file")
    (tmp_path / "foreign").mkdir()
    refused(tmp_path / "foreign", "not a run folder of Excite")
    (tmp_path / "foreign" / "run.json").write_text('{"format": "something else"}')
    refused(tmp_path / "foreign", "not a run folder of Excite")


@pytest.mark.parametrize("name", ["run.json", "config.json", "environment.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"{" * 10_000])
def test_damaged_json(path: Path, name: str, content: bytes) -> None:
    (path / name).write_bytes(content)
    refused(path, name)


@pytest.mark.parametrize("name", ["config.json", "environment.json"])
def test_incomplete_folder(path: Path, name: str) -> None:
    (path / name).unlink()
    refused(path, "missing")


def test_a_newer_format_and_an_unknown_status(path: Path) -> None:
    marker = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**marker, "version": 2}))
    refused(path, r"has format version 2; Excite \S+ reads versions up to 1: upgrade Excite")
    with pytest.raises(RunError, match="format version 2"):
        read_status(path)
    for dry_run in (True, False):
        with pytest.raises(RunError, match="format version 2"):
            repair(path, dry_run=dry_run)
    for version in (None, "new", 0, True):
        (path / "run.json").write_text(json.dumps({**marker, "version": version}))
        refused(path, "damaged")
    (path / "run.json").write_text(json.dumps({**marker, "status": "sleeping"}))
    refused(path, "damaged")


def test_an_older_format_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (folder, metrics_reader, metrics):
        monkeypatch.setattr(module, "VERSION", 3)
    with Run.open(path, "a") as run:
        run.log(300, {"a/b": 1.0})
    assert len(Run.open(path).frame()) == 601
    assert read_status(path)[0] == "done"


def test_newer_metrics_and_checkpoints_are_refused_by_name(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, Run.open(path, "a") as run:
        patch.setattr(checkpoints, "VERSION", 3)
        run.save_checkpoint(1, {})
    with pytest.raises(
        RunError, match=r"step-00000001.safetensors has format version 3; Excite \S+ reads versions up to 2"
    ):
        Run.open(path).load_checkpoint()
    with closing(sqlite3.connect(path / "metrics.db")) as connection:
        connection.execute("PRAGMA user_version = 7")
    refused(path, r"metrics.db has format version 7; Excite \S+ reads versions up to 1: upgrade")


def test_a_database_that_is_not_one(path: Path) -> None:
    (path / "metrics.db").write_bytes(b"not a database at all, but long enough to be looked at" * 100)
    refused(path, r"metrics\.db is damaged")
    (path / "metrics.db").write_bytes(b"")
    refused(path, r"metrics\.db")
    (path / "metrics.db").unlink()
    with sqlite3.connect(path / "metrics.db") as other:
        other.execute("CREATE TABLE t (x)")
    other.close()
    refused(path, "not a metrics database of Excite")


def test_flipped_bytes_raise_nothing_but_a_run_error(path: Path, tmp_path: Path) -> None:
    good = (path / "metrics.db").read_bytes()
    noticed = []
    for at in [*range(0, 100, 3), *range(100, len(good), 997)]:
        copy = tmp_path / f"copy-{at}"
        shutil.copytree(path, copy)
        (copy / "metrics.db").write_bytes(good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :])
        try:
            with load_run(copy) as run:
                run.frame()
        except RunError as error:
            noticed.append(str(error))
        shutil.rmtree(copy)
    assert len(noticed) > 10
    assert not any("\n" in message for message in noticed)


def test_a_database_cut_short(path: Path) -> None:
    good = (path / "metrics.db").read_bytes()
    assert len(good) > 8192
    (path / "metrics.db").write_bytes(good[:5000])
    refused(path, r"metrics\.db is damaged")


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="exists and is not a directory"):
        Run.create(tmp_path / "file", {})
    with pytest.raises(RunError, match=r"is a file, not a folder|exists and is not a directory"):
        Run.create(tmp_path / "file" / "run", {})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("x")
    with pytest.raises(RunError, match="not empty"):
        Run.create(tmp_path / "full", {})
    assert (tmp_path / "full" / "precious.txt").read_text() == "x"


@pytest.mark.parametrize(
    ("number", "match"), [(errno.ENOSPC, "full"), (errno.EROFS, "read-only"), (errno.EACCES, "permission")]
)
@pytest.mark.parametrize("call", ["fsync", "replace", "rename"])
def test_creating_on_a_bad_disk_leaves_nothing(tmp_path: Path, monkeypatch, number: int, match: str, call: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(RunError, match=match) as error:
            Run.create(tmp_path / "run", {})
    one_line(error)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_on_a_full_disk_keeps_the_last_good_one(tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Run.create(tmp_path / "run", {}) as run:
        run.save_checkpoint(1, {"x": torch.zeros(3)})
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(RunError, match="the disk is full"):
                run.save_checkpoint(2, {"x": torch.ones(3)})
        assert [p.name for p in (run.path / "checkpoints").iterdir()] == ["step-00000001.safetensors"]
        assert run.load_checkpoint()[0] == 1


FULL = """
import resource, sys, torch
from excite.errors import RunError
from excite.runs import Run
run = Run.create(sys.argv[1], {})
run.save_checkpoint(1, {"x": torch.zeros(10)})
run.log(0, {"a/b": 1.0}); run.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
for write in (
    lambda: run.save_checkpoint(2, {"x": torch.zeros(200_000)}),
    lambda: [run.log(step, {"a/b": 1.0}) for step in range(100_000)],
):
    try:
        write()
        print("no error")
    except RunError as error:
        print("RunError:", error)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs RLIMIT_FSIZE")
def test_a_file_size_limit_is_a_run_error_and_keeps_the_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "run")], capture_output=True, text=True, timeout=600, check=False
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert all(line.startswith("RunError: cannot") for line in lines)
    with load_run(tmp_path / "run") as run:
        assert run.load_checkpoint()[0] == 1
        assert len(run.frame()) >= 1


def test_reading_from_a_read_only_disk(path: Path, monkeypatch) -> None:
    # Where the shared-memory file of WAL cannot be made, SQLite fails at the first read; as root no chmod does that.
    connect = sqlite3.connect
    tried = []

    class Failing(sqlite3.Connection):
        def execute(self, *_: object) -> sqlite3.Cursor:  # type: ignore[override]
            raise sqlite3.OperationalError("unable to open database file")

    def fake(address: object, *args: object, **kwargs: object) -> sqlite3.Connection:
        tried.append(str(address))
        if "mode=ro" in str(address):
            kwargs["factory"] = Failing
        return connect(address, *args, **kwargs)  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(sqlite3, "connect", fake)
    with load_run(path) as run:
        assert len(run.frame()) == 600
    assert "immutable=1" in tried[-1]
    (path / "metrics.db-wal").write_bytes(b"rows that would be missed")
    with pytest.raises(RunError, match="unable to open"):
        load_run(path)


def test_paths_with_odd_characters(tmp_path: Path) -> None:
    where = tmp_path / "a b#c?d%20é"
    with Run.create(where, {}) as run:
        run.log(0, {"a/b": 1.0})
    assert len(load_run(where).frame()) == 1
