"""Downloads against a server of our own, and archives that want to do harm."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import random
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from excite.data import unpacking
from excite.data.fetching import cache_folder, fetch, fetch_source
from excite.data.sources import SOURCES, Archive, File, Source
from excite.errors import DataError, InputError

_random = random.Random(0)
CONTENT = {"one.bin": _random.randbytes(5000), "two.bin": _random.randbytes(6000)}


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def entry(
    name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(content), kind, link
    return info, content


def tar(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for info, content in entries:
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


GOOD = [entry("set", kind=tarfile.DIRTYPE), entry("set/readme.html", b"hello"), *(entry(f"set/{n}", c) for n, c in CONTENT.items())]  # fmt: skip


def source(content: bytes, url: str = "http://127.0.0.1:9/archive.tar.gz", digest: str | None = None) -> Source:
    files = tuple(File(n, len(c), sha(c)) for n, c in CONTENT.items())
    return Source("toy", "set", (Archive(url, digest or sha(content), files, prefix="set/"),))


class Server:
    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.cut = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append(self.path)
                body = outer.content.get(self.path)
                self.send_response(200 if body is not None else 404)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write((body or b"")[: len(body or b"") - outer.cut])

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()


def files_in(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() or p.is_symlink())


def put(root: Path, content: bytes) -> Path:
    """An archive put into the folder by hand."""
    root.mkdir(exist_ok=True)
    (root / "archive.tar.gz").write_bytes(content)
    return root / "archive.tar.gz"


def test_a_download_is_verified_unpacked_and_cached(server: Server, tmp_path: Path) -> None:
    archive = tar(*GOOD)
    server.content["/archive.tar.gz"] = archive
    toy = source(archive, f"{server.address}/archive.tar.gz")
    seen: list[tuple[str, int, int]] = []
    folder = fetch_source(toy, tmp_path / "new" / "root", lambda *a: seen.append(a))
    assert {n: (folder / n).read_bytes() for n in CONTENT} == CONTENT
    assert files_in(tmp_path) == [f"new/root/set/{n}" for n in CONTENT]
    assert seen
    assert all(phase == "downloading archive.tar.gz" and 0 < done <= total for phase, done, total in seen)
    assert max(total for _, _, total in seen) == len(archive)
    fetch_source(toy, tmp_path / "new" / "root")
    assert len(server.requests) == 1


def test_a_damaged_cached_file_is_fetched_again(server: Server, tmp_path: Path) -> None:
    archive = tar(*GOOD)
    server.content["/archive.tar.gz"] = archive
    toy = source(archive, f"{server.address}/archive.tar.gz")
    folder = fetch_source(toy, tmp_path)
    (folder / "one.bin").write_bytes(b"other" * 1000)
    fetch_source(toy, tmp_path)
    assert (folder / "one.bin").read_bytes() == CONTENT["one.bin"]


def test_single_gz_files(server: Server, tmp_path: Path) -> None:
    packed = gzip.compress(CONTENT["one.bin"])
    server.content["/one.bin.gz"] = packed
    file = File("one.bin", len(CONTENT["one.bin"]), sha(CONTENT["one.bin"]))
    toy = Source("toy", "set", (Archive(f"{server.address}/one.bin.gz", sha(packed), (file,)),))
    assert (fetch_source(toy, tmp_path) / "one.bin").read_bytes() == CONTENT["one.bin"]


def test_a_download_with_the_wrong_hash_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.content["/archive.tar.gz"] = tar(*GOOD)
    toy = source(b"", f"{server.address}/archive.tar.gz", digest="0" * 64)
    with pytest.raises(DataError, match="does not have the expected SHA-256") as error:
        fetch_source(toy, tmp_path)
    assert "\n" not in str(error.value)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("trouble", ["refused", "missing", "cut"])
def test_without_network_it_says_where_to_put_the_file(server: Server, tmp_path: Path, trouble: str) -> None:
    archive = tar(*GOOD)
    url = f"{server.address}/archive.tar.gz" if trouble != "refused" else "http://127.0.0.1:9/archive.tar.gz"
    if trouble == "cut":
        server.content["/archive.tar.gz"], server.cut = archive, 100
    with pytest.raises(DataError) as error:
        fetch_source(source(archive, url), tmp_path)
    message = str(error.value)
    assert "\n" not in message
    assert url in message
    if trouble != "cut":  # a body cut short may also show as a wrong hash
        assert str(tmp_path) in message
        assert "EXCITE_DATA" in message
    assert files_in(tmp_path) == []


def test_an_archive_put_there_by_hand_is_used(tmp_path: Path) -> None:
    archive = tar(*GOOD)
    put(tmp_path, archive)
    folder = fetch_source(source(archive), tmp_path)
    assert (folder / "two.bin").read_bytes() == CONTENT["two.bin"]
    put(tmp_path, archive + b"x")
    (folder / "one.bin").unlink()
    with pytest.raises(DataError, match="expected SHA-256"):
        fetch_source(source(archive), tmp_path)


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
    monkeypatch.setattr(unpacking, "MOST_BYTES", 100_000)
    archive = tar(entry("set/padding", b"\0" * 200_000), *GOOD)
    put(tmp_path, archive)
    with pytest.raises(DataError, match="larger than it should be"):
        fetch_source(source(archive), tmp_path)
    monkeypatch.setattr(unpacking, "MOST_MEMBERS", 2)
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


def test_a_file_in_place_of_the_cache_folder(tmp_path: Path) -> None:
    (tmp_path / "root").write_text("x")
    with pytest.raises(DataError, match="cannot write"):
        fetch_source(source(b""), tmp_path / "root")


def test_where_the_cache_is(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EXCITE_DATA", str(tmp_path / "data"))
    assert cache_folder() == tmp_path / "data"
    assert cache_folder(tmp_path / "root") == tmp_path / "root"
    monkeypatch.delenv("EXCITE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder() == tmp_path / "cache" / "excite"


def test_only_downloaded_sets_are_fetched() -> None:
    with pytest.raises(InputError, match="built in"):
        fetch("digits")


def test_every_file_of_the_sources_has_a_hash() -> None:
    for known in SOURCES.values():
        for item in (*known.archives, *known.files):
            assert len(item.sha256) == 64
            assert int(item.sha256, 16) >= 0
        assert all(archive.url.startswith("https://") for archive in known.archives)
    assert len(SOURCES["cifar10"].files) == 6
    assert len(SOURCES["mnist"].files) == 4
