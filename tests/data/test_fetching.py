"""Downloads against a server of our own."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from data.archives import CONTENT, GOOD, files_in, put, sha, source, tar
from excite.data.fetching import cache_folder, fetch, fetch_source
from excite.data.sources import SOURCES, Archive, File, Source
from excite.errors import DataError, InputError


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


@pytest.mark.slow
def test_a_damaged_cached_file_is_fetched_again(server: Server, tmp_path: Path) -> None:
    archive = tar(*GOOD)
    server.content["/archive.tar.gz"] = archive
    toy = source(archive, f"{server.address}/archive.tar.gz")
    folder = fetch_source(toy, tmp_path)
    (folder / "one.bin").write_bytes(b"other" * 1000)
    fetch_source(toy, tmp_path)
    assert (folder / "one.bin").read_bytes() == CONTENT["one.bin"]


@pytest.mark.slow
def test_single_gz_files(server: Server, tmp_path: Path) -> None:
    packed = gzip.compress(CONTENT["one.bin"])
    server.content["/one.bin.gz"] = packed
    file = File("one.bin", len(CONTENT["one.bin"]), sha(CONTENT["one.bin"]))
    toy = Source("toy", "set", (Archive(f"{server.address}/one.bin.gz", sha(packed), (file,)),))
    assert (fetch_source(toy, tmp_path) / "one.bin").read_bytes() == CONTENT["one.bin"]


@pytest.mark.slow
def test_a_download_with_the_wrong_hash_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.content["/archive.tar.gz"] = tar(*GOOD)
    toy = source(b"", f"{server.address}/archive.tar.gz", digest="0" * 64)
    with pytest.raises(DataError, match="does not have the expected SHA-256") as error:
        fetch_source(toy, tmp_path)
    assert "\n" not in str(error.value)
    assert files_in(tmp_path) == []


@pytest.mark.slow
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


def test_an_archive_of_another_set_is_passed_over(server: Server, tmp_path: Path, monkeypatch) -> None:
    archive = tar(*GOOD)
    other, wanted = b"of another set", source(archive, f"{server.address}/archive.tar.gz")
    monkeypatch.setitem(SOURCES, "other", source(other))
    server.content["/archive.tar.gz"] = archive
    put(tmp_path, other)
    folder = fetch_source(wanted, tmp_path)
    assert (folder / "two.bin").read_bytes() == CONTENT["two.bin"]
    put(folder, archive)
    (folder / "two.bin").unlink()
    fetch_source(wanted, tmp_path)
    assert (folder / "two.bin").read_bytes() == CONTENT["two.bin"]
    assert len(server.requests) == 1  # the second time the one in the folder of the set


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
