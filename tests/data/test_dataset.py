"""Selection of classes and points, and the range of pixels."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from excite.data import load
from excite.data.dataset import corrupted


def test_classes_become_labels_in_the_given_order() -> None:
    every, pair, swapped = load("digits"), load("digits", classes=(3, 8)), load("digits", classes=(8, 3))
    assert torch.equal(pair.x_train[pair.y_train == 1], every.x_train[every.y_train == 8])
    assert torch.equal(pair.x_train[pair.y_train == 0], every.x_train[every.y_train == 3])
    assert torch.equal(pair.y_train, 1 - swapped.y_train)
    assert (pair.classes, swapped.classes) == (("3", "8"), ("8", "3"))


def test_sizes_are_balanced_and_nested() -> None:
    small, large = load("digits", classes=(3, 8), train=21, test=10), load("digits", classes=(3, 8), train=100)
    assert small.y_train.bincount().tolist() == [11, 10]
    assert small.y_test.bincount().tolist() == [5, 5]
    inside = (small.x_train.flatten(1)[:, None] == large.x_train.flatten(1)[None]).all(-1).any(1)
    assert bool(inside.all())


def test_scale_is_what_the_extreme_pixels_become() -> None:
    data = load("digits", scale=(0, 3))
    assert (float(data.x_train.min()), float(data.x_train.max()), data.bounds) == (0.0, 3.0, (0.0, 3.0))


def test_larger_shares_of_corrupted_labels_contain_smaller_ones() -> None:
    y = torch.randint(2, (2000,), generator=torch.Generator().manual_seed(5)).float()
    changed = [corrupted(y, share, 0) != y for share in (0.0, 0.2, 0.4, 0.6)]
    assert not changed[0].any()
    for less, more in pairwise(changed):
        assert (more | ~less).all()
    assert float(changed[-1].float().mean()) == pytest.approx(0.3, abs=0.03)
    assert not torch.equal(corrupted(y, 0.4, 0), corrupted(y, 0.4, 1))


def test_corrupted_labels_of_many_classes_are_drawn_from_all() -> None:
    y = torch.full((4000,), 3)
    drawn = corrupted(y, 0.5, 1, classes=10)
    assert float((drawn != 3).float().mean()) == pytest.approx(0.45, abs=0.03)
    assert set(drawn.tolist()) == set(range(10))
    assert drawn.dtype == y.dtype
