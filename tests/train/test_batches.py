"""The order of points: each once per epoch, from the seed alone, and the same after a checkpoint. Flips and shifts of images."""

from __future__ import annotations

import pytest
import torch

from excite.errors import InputError
from excite.train import build
from excite.train.batches import Shuffle, augmented

CPU = torch.device("cpu")


def test_every_point_once_per_epoch_in_batches() -> None:
    shuffle = Shuffle(10, 4, seed=3)
    epochs = [shuffle.epoch(CPU) for _ in range(3)]
    for batches in epochs:
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert torch.cat(batches).sort().values.tolist() == list(range(10))
    assert not torch.equal(torch.cat(epochs[0]), torch.cat(epochs[1]))


def test_the_order_depends_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    one = Shuffle(20, 4, seed=3).order()
    torch.manual_seed(1)
    assert torch.equal(Shuffle(20, 4, seed=3).order(), one)
    assert not torch.equal(Shuffle(20, 4, seed=4).order(), one)


def test_a_restored_state_draws_the_same_orders() -> None:
    shuffle = Shuffle(20, 4, seed=3)
    current = shuffle.order()
    inside, between = shuffle.state_dict(between=False), shuffle.state_dict(between=True)
    following = shuffle.order()
    for state, expected in ((inside, current), (between, following)):
        other = Shuffle(20, 4, seed=9)
        other.load_state_dict(state)
        assert torch.equal(other.order(), expected)


def moved(image: torch.Tensor, flip: bool, down: int, right: int) -> torch.Tensor:
    """The slow way: every pixel from where it was, edges repeated."""
    _, height, width = image.shape
    source = image.flip(-1) if flip else image
    rows = [min(max(i - down, 0), height - 1) for i in range(height)]
    columns = [min(max(j - right, 0), width - 1) for j in range(width)]
    return torch.stack([torch.stack([source[:, i, j] for j in columns], -1) for i in rows], 1)


def test_every_image_is_one_of_the_flips_and_shifts() -> None:
    torch.manual_seed(0)
    x = torch.rand(40, 2, 5, 6)
    seen = set()
    for before, after in zip(x, augmented(x, shift=2)):
        kinds = [
            (flip, down, right)
            for flip in (False, True)
            for down in range(-2, 3)
            for right in range(-2, 3)
            if torch.equal(moved(before, flip, down, right), after)
        ]
        assert len(kinds) == 1
        seen.update(kinds)
    assert len(seen) > 20


def test_only_what_is_asked_for() -> None:
    torch.manual_seed(0)
    x = torch.rand(30, 1, 4, 4)
    flipped = augmented(x, flip=True, shift=0)
    same = (flipped == x).flatten(1).all(1)
    assert 5 < int(same.sum()) < 25
    assert torch.equal(flipped[~same], x[~same].flip(-1))
    assert torch.equal(augmented(x, flip=False, shift=0), x)


def test_draws_come_from_the_global_state() -> None:
    x = torch.rand(8, 3, 6, 6)
    torch.manual_seed(3)
    first = augmented(x)
    torch.manual_seed(3)
    assert torch.equal(augmented(x), first)
    assert not torch.equal(augmented(x), first)


def test_points_are_refused() -> None:
    with pytest.raises(InputError, match=r"expected images of shape \(B, C, H, W\); got \(3, 2\)"):
        augmented(torch.zeros(3, 2))


def test_dropout_starts_from_the_same_weights() -> None:
    plain, dropped = build("papers-cnn", seed=1), build("papers-cnn", seed=1, dropout=0.5)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), dropped.parameters()))
    x = torch.rand(2, 3, 32, 32)
    assert not torch.equal(dropped(x), dropped(x))
    assert torch.equal(dropped.eval()(x), plain.eval()(x))
    with pytest.raises(InputError, match="less than 1; got 1"):
        build("papers-cnn", dropout=1)
