"""Sets of images, and the files they come from."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data.archives import sha
from excite.data import load
from excite.data.fetching import is_right
from excite.data.images import idx
from excite.data.sources import SOURCES, File
from excite.errors import DataError


def test_digits_are_split_by_class_without_overlap() -> None:
    from sklearn.datasets import load_digits

    data, original = load("digits"), load_digits()
    assert len(data.x_train) + len(data.x_test) == 1797
    together = torch.cat([data.x_train, data.x_test]).flatten(1)
    expected = torch.from_numpy(original.data).float() / 8 - 1
    assert torch.equal(together.sort(0).values, expected.sort(0).values)
    for digit, total in enumerate(np.bincount(original.target)):
        assert int((data.y_test == digit).sum()) == round(total / 2)
    assert data.x_train.shape[1:] == (1, 8, 8)
    assert (data.x_train.dtype, data.y_train.dtype) == (torch.float32, torch.int64)
    assert data.bounds == (-1, 1)


def test_a_damaged_cached_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-bin").mkdir()
    (tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin").write_bytes(b"\0" * 30730000)
    with pytest.raises(DataError, match="expected SHA-256"):
        load("cifar10", root=tmp_path)


def test_idx_files() -> None:
    content = b"\0\0\x08\x02" + (2).to_bytes(4, "big") + (3).to_bytes(4, "big") + bytes(range(6))
    assert idx(content, "x").tolist() == [[0, 1, 2], [3, 4, 5]]
    for bad in (content[:-1], content + b"x", content[:6], b"", b"\0\0\x09\x01" + content[4:]):
        with pytest.raises(DataError):
            idx(bad, "x")


def have(name: str) -> bool:
    """Whether EXCITE_DATA holds the set already; nothing is downloaded by tests."""
    root = os.environ.get("EXCITE_DATA")
    source = SOURCES[name]
    return root is not None and all(is_right(Path(root) / source.folder / f.name, f) for f in source.files)


def write_idx(path: Path, values: np.ndarray) -> File:
    """Writes bytes in the idx format; the file with its hash."""
    lengths = b"".join(length.to_bytes(4, "big") for length in values.shape)
    content = b"\0\0\x08" + bytes([values.ndim]) + lengths + values.tobytes()
    path.write_bytes(content)
    return File(path.name, len(content), sha(content))


@pytest.mark.parametrize(("name", "second"), [("mnist", "1"), ("fashion-mnist", "Trouser")])
def test_sets_in_the_idx_format(name: str, second: str, tmp_path: Path, monkeypatch) -> None:
    source, generator = SOURCES[name], np.random.default_rng(0)
    (tmp_path / source.folder).mkdir()
    arrays = [
        generator.integers(0, 256, (20, 28, 28)).astype(np.uint8), np.arange(20, dtype=np.uint8) % 10,
        generator.integers(0, 256, (10, 28, 28)).astype(np.uint8), np.arange(10, dtype=np.uint8),
    ]  # fmt: skip
    files = [write_idx(tmp_path / source.folder / file.name, a) for file, a in zip(source.files, arrays)]
    archives = tuple(replace(archive, files=(file,)) for archive, file in zip(source.archives, files))
    monkeypatch.setitem(SOURCES, name, replace(source, archives=archives))
    data = load(name, root=tmp_path, scale=(0, 255))
    assert data.name == name
    assert data.classes[1] == second
    assert len(set(data.classes)) == 10
    assert np.array_equal(data.x_train[:, 0], arrays[0])
    assert np.array_equal(data.x_test[:, 0], arrays[2])
    assert torch.equal(data.y_test, torch.arange(10))


@pytest.mark.slow
def test_published_statistics_of_fashion_mnist() -> None:
    if not have("fashion-mnist"):
        pytest.skip("set EXCITE_DATA to a folder with fashion-mnist")
    data = load("fashion-mnist", scale=(0, 1))
    assert data.y_train.bincount().tolist() == [6000] * 10
    assert data.y_test.bincount().tolist() == [1000] * 10
    assert float(data.x_train.double().mean()) == pytest.approx(0.2860, abs=5e-5)
    assert float(data.x_train.double().std()) == pytest.approx(0.3530, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar10", "mnist"])
def test_the_real_sets_if_they_are_there(name: str) -> None:
    if not have(name):
        pytest.skip(f"set EXCITE_DATA to a folder with {name}")
    data = load(name, classes=(0, 7), test=100)
    shape, count = ((3, 32, 32), [5000, 5000]) if name == "cifar10" else ((1, 28, 28), [5923, 6265])
    assert data.shape == shape
    assert data.y_train.bincount().tolist() == count
    assert (float(data.x_train.min()), float(data.x_train.max())) == (-1, 1)
    assert data.classes == (("airplane", "horse") if name == "cifar10" else ("0", "7"))
