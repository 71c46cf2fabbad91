"""Archives that are damaged or want to do harm."""

from __future__ import annotations

import errno
import gzip
import os
import tarfile
from pathlib import Path

import pytest

from data.archives import CONTENT, GOOD, entry, files_in, put, sha, source, tar
from excite.data import unpacking
from excite.data.fetching import fetch_source
from excite.data.sources import Archive, File, Source
from excite.errors import DataError

BAD = {
    "missing member": (GOOD[:-1], "does not hold"),
    "symlink": ([*GOOD[:-1], entry("set/two.bin", kind=tarfile.SYMTYPE, link="/etc/passwd")], "regular file"),
    "hard link": ([*GOOD[:-1], entry("set/two.bin", kind=tarfile.LNKTYPE, link="set/one.bin")], "regular file"),
    "folder": ([*GOOD[:-1], entry("set/two.bin", kind=tarfile.DIRTYPE)], "regular file"),
    "device": ([*GOOD[:-1], entry("set/two.bin", kind=tarfile.CHRTYPE)], "regular file"),
    "parent path": ([*GOOD[:-1], entry("../two.bin", CONTENT["two.bin"])], "does not hold"),
    "parent inside": ([*GOOD[:-1], entry("set/../../two.bin", CONTENT["two.bin"])], "does not hold"),
    "absolute path": ([*GOOD[:-1], entry("/set/two.bin", CONTENT["two.bin"])], "does not hold"),
    "wrong size": ([*GOOD[:-1], entry("set/two.bin", CONTENT["two.bin"] + b"x")], "bytes instead of"),
    "wrong content": ([*GOOD[:-1], entry("set/two.bin", b"s3cond" * 1000)], "SHA-256"),
    "twice": ([*GOOD, entry("set/two.bin", b"s3cond" * 1000)], "twice"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_archives_are_refused_and_write_nothing(tmp_path: Path, name: str) -> None:
    # Their hash is "right" here: unpacking has to be safe by itself.
    entries, match = BAD[name]
    archive = tar(*entries)
    root = tmp_path / "a" / "b" / "root"
    root.parent.mkdir(parents=True)
    put(root, archive)
    with pytest.raises(DataError, match=match) as error:
        fetch_source(source(archive), root)
    assert "\n" not in str(error.value)
    assert files_in(tmp_path) == ["a/b/root/archive.tar.gz"]


def test_harmful_paths_beside_good_members_are_never_used(tmp_path: Path) -> None:
    evil = [
        entry("../evil", b"x"),
        entry("/tmp/evil-absolute", b"x"),
        entry("set/link", kind=tarfile.SYMTYPE, link="/"),
    ]
    archive = tar(*evil, *GOOD, entry("set/link/evil", b"x"))
    root = tmp_path / "inner" / "root"
    root.parent.mkdir()
    put(root, archive)
    fetch_source(source(archive), root)
    assert files_in(tmp_path) == ["inner/root/archive.tar.gz", "inner/root/set/one.bin", "inner/root/set/two.bin"]
    assert not Path("/tmp/evil-absolute").exists()


def test_truncated_archives(tmp_path: Path) -> None:
    good = tar(*GOOD)
    # Only padding and the checksum of gzip may be missing: all files are there by then, and hashed.
    for size in range(0, len(good) - 100, 97):
        root = tmp_path / str(size)
        put(root, good[:size])
        with pytest.raises(DataError):
            fetch_source(source(good[:size]), root)
        assert files_in(root) == ["archive.tar.gz"]


def test_flipped_bytes_never_change_what_is_unpacked(tmp_path: Path) -> None:
    good = tar(*GOOD)
    for at in [*range(60), *range(60, len(good), 41)]:
        bad = good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :]
        root = tmp_path / str(at)
        put(root, bad)
        try:
            folder = fetch_source(source(bad), root)
        except DataError:
            assert files_in(root) == ["archive.tar.gz"]
        else:  # the flip hit something that does not matter, such as the time in the header
            assert {n: (folder / n).read_bytes() for n in CONTENT} == CONTENT


def test_a_huge_member_is_refused_without_being_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(unpacking, "MAX_BYTES", 100_000)
    archive = tar(entry("set/padding", b"\0" * 200_000), *GOOD)
    put(tmp_path, archive)
    with pytest.raises(DataError, match="larger than it should be"):
        fetch_source(source(archive), tmp_path)
    monkeypatch.setattr(unpacking, "MAX_MEMBERS", 2)
    archive = tar(*GOOD)
    put(tmp_path, archive)
    with pytest.raises(DataError, match="larger than it should be"):
        fetch_source(source(archive), tmp_path)


def test_a_gzip_bomb_stops_at_the_expected_size(tmp_path: Path) -> None:
    bomb = gzip.compress(b"\0" * 50_000_000)
    file = File("one.bin", 1000, sha(b"\0" * 1000))
    toy = Source("toy", "set", (Archive("http://127.0.0.1:9/one.bin.gz", sha(bomb), (file,)),))
    (tmp_path / "one.bin.gz").write_bytes(bomb)
    with pytest.raises(DataError, match="longer than 1000 bytes"):
        fetch_source(toy, tmp_path)
    assert files_in(tmp_path) == ["one.bin.gz"]


@pytest.mark.parametrize(("number", "match"), [(errno.ENOSPC, "full"), (errno.EROFS, "read-only")])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_bad_disk_is_a_data_error(tmp_path: Path, monkeypatch, number: int, match: str, call: str) -> None:
    archive = tar(*GOOD)
    put(tmp_path, archive)

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(DataError, match=match):
        fetch_source(source(archive), tmp_path)
    monkeypatch.undo()
    assert files_in(tmp_path) == ["archive.tar.gz"]
