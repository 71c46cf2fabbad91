"""Running a model leaves its buffers, modes and the random state as they were."""

import pytest
import torch
from torch import nn

from excite._core.preserve import (
    Buffers,
    RandomState,
    device_of,
    eval_mode,
    ignore_probes,
    modules_of,
    preserve_state,
    probes_ignored,
)
from models import same_state, state_of
from transformer_zoo import NAMES, make


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))


def test_buffers_modes_and_random_state_are_restored():
    model = network()
    model[2].eval()
    before, random = state_of(model), torch.get_rng_state()
    with preserve_state(model):
        assert probes_ignored()
        model.train()
        model(torch.randn(5, 3))
        model.eval()
    assert same_state(before, state_of(model))
    assert torch.equal(random, torch.get_rng_state())
    assert [module.training for module in model] == [True, True, False]
    assert not probes_ignored()


def test_evaluation_mode_ends_with_the_block():
    model = network()
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert all(module.training for module in model.modules())


def test_ignored_probes_nest():
    with ignore_probes():
        with ignore_probes():
            pass
        assert probes_ignored()
    assert not probes_ignored()


def test_a_buffer_that_was_replaced_is_put_back():
    model = network()
    buffers, mean = Buffers(model), model[1].running_mean
    model[1].running_mean = torch.ones(4)
    mean.fill_(7)
    buffers.restore(thorough=False)
    assert model[1].running_mean is mean
    assert not mean.any()


def test_a_random_state_knows_whether_numbers_were_drawn():
    state = RandomState(device_of(network()))
    assert not state.moved()
    torch.rand(1)
    assert state.moved()
    state.restore()
    assert not state.moved()


class Shared(nn.Module):
    """A layer that two modules hold, one place that is empty, and a module that holds its parent's sibling."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
        self.second, self.empty = nn.Sequential(self.first[0], nn.Tanh(), self.first), None
        self.register_module("none", None)


@pytest.mark.parametrize("name", NAMES)
def test_modules_of_transformers(name):
    model = make(name).model
    assert modules_of(model) == list(model.modules())


def test_modules_that_are_shared_come_once():
    model = Shared()
    assert modules_of(model) == list(model.modules())
