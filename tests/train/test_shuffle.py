"""The order of points: each once per epoch, from the seed alone, and the same after a checkpoint."""

from __future__ import annotations

import torch

from excite.train.shuffle import Shuffle

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
