"""Seeded blocks that give the user's random state back."""

import random

import numpy as np
import torch

from excite._core.randomness import own_randomness, seeded_weights, stream

CPU = torch.device("cpu")


def drawn():
    return float(torch.rand(1)), float(np.random.rand()), random.random()  # noqa: NPY002


def test_the_state_before_comes_back():
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    with own_randomness(1, CPU):
        first = drawn()
    with own_randomness(1, CPU):
        assert drawn() == first
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002
    assert before[2] == random.getstate()


def test_weights_are_drawn_from_their_own_seed():
    def weight(seed):
        with seeded_weights(seed):
            return torch.nn.Linear(3, 3).weight.detach()

    assert torch.equal(weight(1), weight(1))
    assert not torch.equal(weight(1), weight(2))


def test_streams_of_one_seed_differ():
    assert len({stream(0, k) for k in range(100)}) == 100
