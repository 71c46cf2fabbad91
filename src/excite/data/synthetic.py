"""The synthetic sets of the papers, with the authors' settings, and two moons for quick tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from excite._core.checks import check_number
from excite.data.dataset import Dataset, check_size
from excite.errors import InputError

Points = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]  # (N, D) and (N,)


@dataclass(frozen=True)
class Synthetic:
    """How a set is drawn: `draw(n, rng, shared, **options)`; `train` and `test` are the authors' numbers of points.

    `rng` differs between training and test points; `shared` is the same for both: it draws what makes the problem.
    """

    draw: Callable[..., Points]
    train: int
    test: int
    description: str
    fixed: bool = False  # the points of the paper, no more and no fewer
    regression: bool = False
    options: tuple[tuple[str, float], ...] = ()


def boundaries(n: int, rng: np.random.Generator, shared: np.random.Generator) -> Points:
    """Persistency of excitation, figure 1: class 0 around (7, 19); class 1 half around (0, 5), half around (11, 27)."""
    first = n - n // 2
    second = n // 2
    centers = [(7.0, 19.0)] * first + [(0.0, 5.0)] * (second - second // 2) + [(11.0, 27.0)] * (second // 2)
    return np.array(centers) + 0.5 * rng.standard_normal((n, 2)), _labels(first, second)


def linear_margins_1(n: int, rng: np.random.Generator, shared: np.random.Generator) -> Points:
    """Figure 2, first set: two ellipses of 20 points, t = 2πi/20."""
    t = 2 * np.pi * np.arange(n // 2) / (n // 2)
    first = np.stack([-35 + 58 * np.cos(t), -35 + 58 * np.sin(t - np.pi / 8)], 1)
    second = np.stack([35 + 35 * np.cos(t), 35 + 35 * np.sin(t - np.pi / 2.3)], 1)
    return np.concatenate([first, second]), _labels(n // 2, n // 2)


def linear_margins_2(n: int, rng: np.random.Generator, shared: np.random.Generator) -> Points:
    """Figure 2, second set: points (u, 10 + 20u) with u = 2 − 0.8·U(0, 1) against u = 4 − 0.8·U(0, 1)."""
    first, second = n - n // 2, n // 2
    u = np.array([2.0] * first + [4.0] * second) - 0.8 * rng.random(n)
    return np.stack([u, 10 + 20 * u], 1), _labels(first, second)


def frequencies(n: int, rng: np.random.Generator, shared: np.random.Generator, omega: float) -> Points:
    """What training reveals, task 1: y = cos(2πω z1) cos(2πω z2) for z in [−1, 1]², x = 10·Q z with Q orthonormal."""
    q, r = np.linalg.qr(shared.standard_normal((10, 2)))
    q = q * np.sign(np.diag(r))
    z = rng.uniform(-1, 1, (n, 2))
    return 10 * z @ q.T, np.cos(2 * np.pi * omega * z[:, 0]) * np.cos(2 * np.pi * omega * z[:, 1])


def moons(n: int, rng: np.random.Generator, shared: np.random.Generator, noise: float) -> Points:
    """Two interleaved half circles of radius 1 with Gaussian noise."""
    first, second = n - n // 2, n // 2
    t = np.pi * rng.random(n)
    upper = np.stack([np.cos(t), np.sin(t)], 1)
    lower = np.stack([1 - np.cos(t), 0.5 - np.sin(t)], 1)
    y = _labels(first, second)
    return np.where(y[:, None] == 0, upper, lower) + noise * rng.standard_normal((n, 2)), y


def _labels(first: int, second: int) -> npt.NDArray[np.float64]:
    return np.repeat([0.0, 1.0], [first, second])


SETS: dict[str, Synthetic] = {
    "boundaries": Synthetic(boundaries, 16, 200, "8 points per class: one class between the two halves of the other"),
    "linear-margins-1": Synthetic(linear_margins_1, 40, 0, "20 points per class on two ellipses", fixed=True),
    "linear-margins-2": Synthetic(linear_margins_2, 40, 0, "20 points per class on two pieces of a line"),
    "frequencies": Synthetic(
        frequencies, 100, 30, "y = cos(2πω z1) cos(2πω z2), embedded in 10 dimensions",
        regression=True, options=(("omega", 0.5),),
    ),
    "moons": Synthetic(moons, 200, 200, "two interleaved half circles", options=(("noise", 0.1),)),
}  # fmt: skip


def make(name: str, train: int | None, test: int | None, seed: int, options: dict[str, float]) -> Dataset:
    """Training and test points of one problem; the test points do not depend on the number of training points."""
    points_of = SETS[name]
    settings = {**dict(points_of.options), **options}
    for option, value in options.items():
        if option not in dict(points_of.options):
            known = ", ".join(dict(points_of.options)) or "none"
            raise InputError(f"{name} has no option {option!r}; its options: {known}")
        check_number(value, option, 0)
    check_size(train, "train", 2)
    check_size(test, "test", 0)
    if points_of.fixed and (train not in (None, points_of.train) or test not in (None, points_of.test)):
        raise InputError(
            f"{name} has {points_of.train} training points and {points_of.test} test points: leave train and test out"
        )
    n_train = points_of.train if train is None else train
    n_test = points_of.test if test is None else test
    splits: list[tuple[Tensor, Tensor]] = []
    for split, n in (("train", n_train), ("test", n_test)):
        rng, shared = np.random.default_rng([seed, split == "test"]), np.random.default_rng([seed, 2])
        x, y = points_of.draw(n, rng, shared, **settings)
        targets = torch.from_numpy(y)
        splits.append((torch.from_numpy(x).float(), targets.float() if points_of.regression else targets.long()))
    classes = () if points_of.regression else ("0", "1")
    return Dataset(name, *splits[0], *splits[1], classes, None, points_of.description)
