"""Datasets in files of tensors."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from excite.data.files import load_file
from excite.errors import DataError


def tensors(**changed):
    found = {
        "x_train": torch.rand(6, 2), "y_train": torch.tensor([0, 1, 2, 0, 1, 2]),
        "x_test": torch.rand(3, 2), "y_test": torch.tensor([0, 1, 1]),
    }  # fmt: skip
    found |= changed
    return {name: value for name, value in found.items() if value is not None}


def stored(folder, header=None, **changed):
    path = folder / "data.safetensors"
    save_file(tensors(**changed), path, header)
    return path


def test_safetensors_and_npz(tmp_path):
    given = tensors()
    np.savez(tmp_path / "data.npz", **{name: value.numpy() for name, value in given.items()})
    save_file(given, tmp_path / "data.safetensors")
    for name in ("data.npz", "data.safetensors"):
        data = load_file(tmp_path / name).data
        assert torch.equal(data.x_train, given["x_train"])
        assert torch.equal(data.y_test, given["y_test"])
        assert (data.name, data.classes, data.bounds) == ("data", ("0", "1", "2"), None)


def test_one_part_is_enough_and_kinds_are_converted(tmp_path):
    path = stored(tmp_path, x_test=None, y_test=None, x_train=torch.rand(6, 2).double(), y_train=torch.zeros(6).int())
    data = load_file(path).data
    assert data.x_test.shape == (0, 2)
    assert (data.x_train.dtype, data.y_train.dtype, data.classes) == (torch.float32, torch.int64, ("0", "1"))
    data = load_file(stored(tmp_path, x_train=None, y_train=None)).data
    assert (len(data.x_train), len(data.x_test)) == (0, 3)


def test_a_regression(tmp_path):
    data = load_file(stored(tmp_path, y_train=torch.rand(6), y_test=torch.rand(3))).data
    assert data.classes == ()


def test_what_the_header_says(tmp_path):
    about = {"bounds": [0, 1], "normalize": [[0.5], [0.2]]}
    found = load_file(stored(tmp_path, {"settings": json.dumps(about)}), "points")
    assert (found.data.bounds, found.data.name, found.about["normalize"]) == ((0.0, 1.0), "points", [[0.5], [0.2]])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"y_train": None}, "expected both x_train and y_train"),
        ({"y_train": torch.zeros(5, dtype=torch.long)}, "y_train: expected one label for each of 6 points"),
        ({"y_test": torch.tensor([0, -1, 1])}, "y_test: expected labels from 0"),
        ({"y_test": torch.tensor([0, 10**9, 1])}, "y_test: expected labels from 0"),
        ({"x_test": torch.rand(3, 4)}, "expected test points like the training points"),
        ({"y_test": torch.rand(3)}, "expected test points like the training points"),
        ({"x_train": torch.zeros(6, 2, dtype=torch.uint8)}, "uint8: scale pixels"),
        ({"x_train": torch.full((6, 2), torch.nan)}, "x_train: expected finite numbers"),
        ({"x_train": torch.rand(6)}, r"x_train: expected points \(N, ...\)"),
        (dict.fromkeys(("x_train", "y_train", "x_test", "y_test")) | {"x": torch.ones(1)}, "got none of them"),
    ],
)
def test_refused(tmp_path, changed, said):
    with pytest.raises(DataError, match=said) as error:
        load_file(stored(tmp_path, **changed))
    assert "\n" not in str(error.value)


def test_files_that_are_something_else(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        load_file(tmp_path / "none.npz")
    with pytest.raises(DataError, match="expected a file of tensors"):
        load_file(tmp_path / "data.csv")
    for name in ("text.npz", "text.safetensors"):
        (tmp_path / name).write_text("hello")
        with pytest.raises(DataError, match="cannot read"):
            load_file(tmp_path / name)
    for header in ("3", "{", '{"bounds": [0]}'):
        with pytest.raises(DataError):
            load_file(stored(tmp_path, {"settings": header}))


def test_pickles_in_an_npz_are_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (tmp_path.joinpath("executed").touch, ())

    np.savez(tmp_path / "evil.npz", x_train=np.array([Evil()], dtype=object), y_train=np.zeros(1, int))
    with pytest.raises(DataError, match="cannot read"):
        load_file(tmp_path / "evil.npz")
    assert not (tmp_path / "executed").exists()
