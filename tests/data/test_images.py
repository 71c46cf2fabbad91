"""Sets of images, and the files they come from."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from excite.data import load
from excite.data.fetching import is_right
from excite.data.images import idx
from excite.data.sources import SOURCES
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
