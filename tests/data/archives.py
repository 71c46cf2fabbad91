"""Archives for the tests of downloads."""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
from pathlib import Path

from excite.data.sources import Archive, File, Source

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


def files_in(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file() or p.is_symlink())


def put(root: Path, content: bytes) -> Path:
    """An archive put into the folder by hand."""
    root.mkdir(exist_ok=True)
    (root / "archive.tar.gz").write_bytes(content)
    return root / "archive.tar.gz"
