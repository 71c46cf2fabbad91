"""Loading of datasets by name."""

from __future__ import annotations

import difflib
import os

from excite._core.checks import check_seed
from excite.data import images, synthetic
from excite.data.dataset import Dataset, Scale, select
from excite.data.fetching import cache_folder
from excite.errors import InputError

BUILT_IN = ("digits", *synthetic.SETS)
"""Names of the datasets that need no download."""
DOWNLOADED = ("cifar10", "mnist", "fashion-mnist")
"""Names of the datasets that `fetch` downloads."""
NAMES = (*BUILT_IN, *DOWNLOADED)
"""Names of all datasets that `load` returns."""


def load(
    name: str,
    *,
    classes: tuple[int | str, ...] | None = None,
    train: int | None = None,
    test: int | None = None,
    seed: int = 0,
    root: str | os.PathLike[str] | None = None,
    scale: Scale = (-1, 1),
    **options: float,
) -> Dataset:
    """Loads a dataset. The same arguments give the same points.

    Args:
        name: "digits", "cifar10", "mnist" or "fashion-mnist" (images); "boundaries", "linear-margins-1", "linear-margins-2", "frequencies" or
            "moons" (synthetic).
        classes: Classes to keep, by number or name; the first becomes label 0, and so on. Images only.
        train: Number of training points, balanced over classes. Default: all.
        test: Number of test points, balanced over classes. Default: all.
        seed: Seed of the subsets, of the split of digits (half and half) and of the synthetic points.
        root: Folder of downloaded sets. Default: the folder that EXCITE_DATA names, else the platform's cache folder.
        scale: Values of the smallest and the largest pixel. Images only.
        **options: `omega` for "frequencies", `noise` for "moons".

    Returns:
        The dataset, on the CPU.

    Raises:
        InputError: If the name or an option is unknown, or there are fewer points than requested.
        DataError: If a downloaded set is not in the folder, or a file does not have the expected SHA-256.

    Example:
        >>> data = load("digits", classes=(8, 9), train=100)
        >>> data.x_train.shape
        torch.Size([100, 1, 8, 8])
    """
    if name not in NAMES:
        near = difflib.get_close_matches(str(name), NAMES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(NAMES)}"
        raise InputError(f"unknown dataset {name!r}: {hint}")
    seed = check_seed(seed)
    if name in synthetic.SETS:
        if classes is not None or tuple(scale) != (-1, 1):
            raise InputError(f"{name} is not a set of images: classes and scale do not apply to it")
        return synthetic.make(name, train, test, seed, options)
    if options:
        raise InputError(f"{name} has no option {next(iter(options))!r}")
    if name == "digits":
        raw = images.digits(seed)
    else:
        raw = {"cifar10": images.cifar10, "mnist": images.mnist, "fashion-mnist": images.fashion_mnist}[name](
            cache_folder(root)
        )
    return select(raw, classes, train, test, seed, scale)
