"""A dataset: training and test points as tensors, with what is known about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from excite._core.checks import as_scalar, check_count, check_pair, is_whole, shown
from excite.errors import DataError, InputError

Scale = tuple[float, float]
Array = npt.NDArray[np.generic]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test points as tensors.

    Attributes:
        name: Name of the set.
        x_train: Training points, float32: images (N, C, H, W) with pixels scaled to `bounds`, or points (N, D).
        y_train: Labels, int64, (N,): 0 … m − 1 in the order of `classes`. Regression targets are float32, (N,).
        x_test: Test points; length 0 for a set without test points.
        y_test: Labels or targets of the test points.
        classes: Names of the classes; empty for regression.
        bounds: Smallest and largest value of a pixel; None for points that are not images.
        description: One line.

    Example:
        >>> data = excite.data.load("digits", classes=(8, 9)).to("cpu")
        >>> data.shape
        (1, 8, 8)
    """

    name: str
    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: tuple[str, ...]
    bounds: Scale | None
    description: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one point."""
        return tuple(self.x_train.shape[1:])

    def to(self, device: torch.device | str) -> Dataset:
        """Returns the set with its tensors on `device`."""
        tensors = {name: getattr(self, name).to(device) for name in ("x_train", "y_train", "x_test", "y_test")}
        return replace(self, **tensors)

    def __repr__(self) -> str:
        what = f"classes {', '.join(self.classes)}" if self.classes else "regression"
        return f"Dataset({self.name}: {len(self.x_train)} training and {len(self.x_test)} test points of shape {self.shape}, {what})"


def corrupted(labels: Tensor, fraction: float, seed: int, classes: int = 2) -> Tensor:
    """Labels of which a fraction is drawn again, all classes with equal chances: with m classes one in m of those stays right.

    The corrupted labels of a larger fraction include those of a smaller one: the same labels are drawn, and more.

    Args:
        labels: Labels 0 … classes − 1.
        fraction: Fraction of them that is drawn again.
        seed: Seed of the draws.
        classes: Number of classes.

    Returns:
        Labels of the same shape and type.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    drawn = torch.randint(classes, (len(labels),), generator=generator).to(labels.dtype)
    chosen = order[: round(fraction * len(labels))]
    changed = labels.clone()
    changed[chosen] = drawn[chosen]
    return changed


@dataclass(frozen=True)
class Raw:
    """Images as they come: pixels (N, C, H, W) from 0 to `top`, labels (N,), for training and test."""

    name: str
    train: tuple[Array, Array]
    test: tuple[Array, Array]
    classes: tuple[str, ...]
    top: int
    description: str


def select(
    raw: Raw,
    classes: tuple[int | str, ...] | None,
    train: int | None,
    test: int | None,
    seed: int,
    scale: Scale,
) -> Dataset:
    """Selects classes, relabelled in the given order, and a balanced number of points of each."""
    chosen = choose_classes(raw.name, raw.classes, classes)
    low, high = check_scale(scale)
    splits: list[tuple[Tensor, Tensor]] = []
    # The two parts draw from independent streams, so that the test points do not depend on how many train.
    for split, (x, y), size in (("train", raw.train, train), ("test", raw.test, test)):
        label = np.full(len(raw.classes), -1)
        label[list(chosen)] = np.arange(len(chosen))
        labels = label[y]
        rows = _balanced(labels, len(chosen), size, split, raw.name, np.random.default_rng([seed, split == "test"]))
        splits.append((_scaled(x[rows], raw.top, low, high), torch.from_numpy(labels[rows].astype(np.int64))))
    names = tuple(raw.classes[c] for c in chosen)
    return Dataset(raw.name, *splits[0], *splits[1], names, (low, high), raw.description)


def choose_classes(name: str, known: tuple[str, ...], classes: object) -> tuple[int, ...]:
    """Returns class numbers from numbers or names."""
    if classes is None:
        return tuple(range(len(known)))
    is_vector = isinstance(classes, np.ndarray | Tensor) and classes.ndim == 1
    if isinstance(classes, str) or not (is_vector or isinstance(classes, Sequence)) or len(classes) < 2:  # type: ignore[arg-type]
        raise InputError(f"classes: expected at least two classes of {name}, such as (0, 1); got {shown(classes)}")
    classes = [as_scalar(c) for c in classes]  # type: ignore[attr-defined]
    chosen = []
    for c in classes:
        if isinstance(c, str) and c in known:
            chosen.append(known.index(c))
        elif is_whole(c) and 0 <= c < len(known):
            chosen.append(int(c))
        else:
            raise InputError(
                f"classes: {name} has no class {c!r}: expected 0 to {len(known) - 1} or one of {', '.join(known)}"
            )
    if len(set(chosen)) < len(chosen):
        raise InputError(f"classes: expected different classes; got {tuple(classes)!r}")
    return tuple(chosen)


def check_scale(scale: Scale) -> Scale:
    """Checks the range of pixels."""
    return check_pair(scale, "scale")


def check_size(size: int | None, split: str, smallest: int = 1) -> None:
    """Checks a number of points; None is all of them."""
    if size is not None:
        check_count(size, split, smallest, also="or None for all")


def stratified(y: Array, fraction: float, seed: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Indices of a training and a test part; of every class a `fraction`, rounded, goes to the test part."""
    rng = np.random.default_rng([seed, 2])
    test: list[npt.NDArray[np.intp]] = []
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        test.append(members[: round(fraction * len(members))])
    chosen = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(y)), chosen), chosen


def _balanced(
    labels: npt.NDArray[np.int64], m: int, size: int | None, split: str, name: str, rng: np.random.Generator
) -> npt.NDArray[np.intp]:
    """Indices of `size` points, equally many of each class up to one; smaller sizes are subsets of larger ones."""
    check_size(size, split, m)
    if size is None:
        return np.flatnonzero(labels >= 0)
    chosen = []
    for c in range(m):
        members = rng.permutation(np.flatnonzero(labels == c))
        needed = size // m + (c < size % m)
        if needed > len(members):
            raise InputError(
                f"{split}={size}: {name} has only {len(members)} points of one of the {m} classes, {needed} are wanted: "
                f"ask for at most {m * len(members)}"
            )
        chosen.append(members[:needed])
    return np.sort(np.concatenate(chosen))


def _scaled(pixels: Array, top: int, low: float, high: float) -> Tensor:
    if pixels.size and int(pixels.max()) > top:
        raise DataError(f"expected pixels from 0 to {top}; got {int(pixels.max())}")
    unit = torch.from_numpy(np.ascontiguousarray(pixels)).float() / top
    return (low + (high - low) * unit).clamp_(low, high)
