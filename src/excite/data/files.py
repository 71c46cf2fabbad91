"""Datasets in a file of tensors: x_train, y_train, x_test, y_test in a .safetensors or .npz file."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from excite._core.checks import check_path
from excite._core.files import open_regular
from excite.data.dataset import Dataset
from excite.errors import DataError, RunError, one_line

KEYS = ("x_train", "y_train", "x_test", "y_test")
SUFFIXES = (".safetensors", ".npz")
_MAX_CLASSES = 10**6


@dataclass(frozen=True)
class DataFile:
    """A dataset with what its file says about how it was measured.

    Attributes:
        data: The dataset.
        about: How they are measured, JSON text in the header's entry "settings": `normalize`, `bounds`, `threshold`, `output`, `key`, as far as known.
    """

    data: Dataset
    about: Mapping[str, Any] = field(default_factory=dict)


def load_file(path: str | os.PathLike[str], name: str | None = None) -> DataFile:
    """Reads a dataset from a file of tensors. Nothing in the file is executed.

    Args:
        path: A .safetensors or .npz file with x_train and y_train, x_test and y_test, or both. Points are floats; labels are
            integers from 0, or floats for a regression.
        name: Name of the set. Default: that of the file.

    Returns:
        The set, on the CPU.

    Raises:
        DataError: If the file cannot be read, or its tensors do not form a dataset.
    """
    file = check_path(path)
    if file.suffix not in SUFFIXES:
        raise DataError(f"{file}: expected a file of tensors, {' or '.join(SUFFIXES)}, with {', '.join(KEYS)}")
    try:
        os.close(open_regular(file))
        tensors, about = _safetensors(file) if file.suffix == ".safetensors" else (_npz(file), {})
    except FileNotFoundError as error:
        raise DataError(f"there is no file {file}") from error
    except (OSError, RunError, ValueError, KeyError, TypeError, RuntimeError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot read {file}: {one_line(error)}") from error
    return DataFile(_dataset(file, name or file.stem, tensors, about), about)


def _safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            known = set(file.keys())
            about = json.loads((file.metadata() or {}).get("settings", "{}"))
            tensors = {key: file.get_tensor(key).clone() for key in KEYS if key in known}
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    if not isinstance(about, dict):
        raise ValueError("its header is damaged")
    return tensors, about


def _npz(path: Path) -> dict[str, Tensor]:
    with np.load(path, allow_pickle=False) as file:
        if not hasattr(file, "files"):
            raise ValueError("it holds one array, not a table of arrays")
        return {key: torch.from_numpy(np.ascontiguousarray(file[key])) for key in KEYS if key in file.files}


def _dataset(path: Path, name: str, tensors: dict[str, Tensor], about: Mapping[str, Any]) -> Dataset:
    splits: dict[str, tuple[Tensor, Tensor]] = {}
    for split in ("train", "test"):
        x, y = tensors.get(f"x_{split}"), tensors.get(f"y_{split}")
        if (x is None) != (y is None):
            raise DataError(f"{path}: expected both x_{split} and y_{split}; got one of them")
        if x is not None and y is not None and len(y):
            splits[split] = _points(path, split, x), _labels(path, split, y, len(x))
    if not splits:
        raise DataError(f"{path}: expected {', '.join(KEYS)}; got {', '.join(tensors) or 'none of them'}")
    x, y = splits.get("train") or splits["test"]
    for split in ("train", "test"):
        splits.setdefault(split, (x[:0], y[:0]))
    (x, y), (x_test, y_test) = splits["train"], splits["test"]
    if x.shape[1:] != x_test.shape[1:] or y.is_floating_point() != y_test.is_floating_point():
        raise DataError(
            f"{path}: expected test points like the training points; got {tuple(x.shape)} and {tuple(x_test.shape)}"
        )
    classes = () if y.is_floating_point() else tuple(map(str, range(max(2, int(torch.cat([y, y_test]).max()) + 1))))
    return Dataset(name, x, y, x_test, y_test, classes, _bounds(path, about), f"from {path.name}")


def _points(path: Path, split: str, x: Tensor) -> Tensor:
    if x.dim() < 2 or x.is_complex() or x.dtype in (torch.uint8, torch.bool):
        hint = ": scale pixels as the model expects them" if x.dtype == torch.uint8 else ""
        raise DataError(
            f"{path}: x_{split}: expected points (N, ...) of floats; got {tuple(x.shape)} of {x.dtype}{hint}"
        )
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        raise DataError(f"{path}: x_{split}: expected finite numbers; got NaN or infinities")
    return x.float() if x.is_floating_point() else x.long()


def _labels(path: Path, split: str, y: Tensor, count: int) -> Tensor:
    if y.dim() < 1 or len(y) != count or y.is_complex():
        raise DataError(f"{path}: y_{split}: expected one label for each of {count} points; got {tuple(y.shape)}")
    if y.is_floating_point():
        return y.float()
    y = y.long()
    if int(y.min()) < 0 or int(y.max()) >= _MAX_CLASSES:
        raise DataError(
            f"{path}: y_{split}: expected labels from 0 to the number of classes − 1; got {int(y.min())} to {int(y.max())}"
        )
    return y


def _bounds(path: Path, about: Mapping[str, Any]) -> tuple[float, float] | None:
    if (bounds := about.get("bounds")) is None:
        return None
    try:
        low, high = map(float, bounds)
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: bounds: expected two numbers; got {bounds!r}") from error
    return low, high
