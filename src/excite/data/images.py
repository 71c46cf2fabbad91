"""Digits, CIFAR-10, MNIST and Fashion-MNIST as arrays of pixels and labels."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from excite.data.dataset import Array, Raw, stratified
from excite.data.fetching import read
from excite.data.sources import SOURCES
from excite.errors import DataError

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
DIGITS = tuple("0123456789")
FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def digits(seed: int) -> Raw:
    """scikit-learn's digits: 1797 images of 8×8, pixels 0 to 16; half of every class is the test part."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = np.asarray(bunch.images).astype(np.uint8)[:, None], np.asarray(bunch.target)
    train, test = stratified(y, 0.5, seed)
    return Raw("digits", (x[train], y[train]), (x[test], y[test]), DIGITS, 16, "handwritten digits, 8×8, scikit-learn")


def cifar10(root: Path) -> Raw:
    """The binary version: records of one label and 3072 pixels, red, green and blue planes of 32×32."""
    source = SOURCES["cifar10"]
    batches = []
    for file in source.files:
        rows = np.frombuffer(read(source, file, root), np.uint8).reshape(-1, 3073)
        batches.append((rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]))
    train = (np.concatenate([x for x, _ in batches[:-1]]), np.concatenate([y for _, y in batches[:-1]]))
    return Raw("cifar10", train, batches[-1], CIFAR10, 255, "CIFAR-10, 32×32 in colour")


def mnist(root: Path) -> Raw:
    """MNIST: images of 28×28 in the idx format."""
    return _idx_set("mnist", root, DIGITS, "MNIST, handwritten digits, 28×28")


def fashion_mnist(root: Path) -> Raw:
    """Fashion-MNIST: images of clothes, in the format of MNIST."""
    return _idx_set("fashion-mnist", root, FASHION, "Fashion-MNIST, clothes, 28×28")


def _idx_set(name: str, root: Path, classes: tuple[str, ...], description: str) -> Raw:
    source = SOURCES[name]
    x_train, y_train, x_test, y_test = (idx(read(source, file, root), file.name) for file in source.files)
    return Raw(name, (x_train[:, None], y_train), (x_test[:, None], y_test), classes, 255, description)


def idx(content: bytes, name: str) -> Array:
    """An array of bytes in the idx format: 0, 0, 8, the number of axes; their lengths; the values."""
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise DataError(f"{name} is not an idx file of bytes")
    axes = content[3]
    start = 4 + 4 * axes
    shape = struct.unpack(f">{axes}I", content[4:start]) if len(content) >= start else ()
    values = np.frombuffer(content, np.uint8, offset=min(start, len(content)))
    if not shape or values.size != int(np.prod(shape, dtype=object)):
        raise DataError(f"{name} is truncated: expected shape {shape}, got {values.size} values")
    return values.reshape(shape)
