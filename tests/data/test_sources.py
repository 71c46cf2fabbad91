"""Addresses and hashes of downloaded sets."""

from __future__ import annotations

from excite.data.sources import SOURCES


def test_every_file_of_the_sources_has_a_hash() -> None:
    for known in SOURCES.values():
        for item in (*known.archives, *known.files):
            assert len(item.sha256) == 64
            assert int(item.sha256, 16) >= 0
        assert all(archive.url.startswith("https://") for archive in known.archives)
    assert len(SOURCES["cifar10"].files) == 6
    assert len(SOURCES["mnist"].files) == len(SOURCES["fashion-mnist"].files) == 4
