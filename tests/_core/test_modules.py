"""All modules of a model, in the order of `Module.modules`."""

import pytest
from torch import nn

from excite._core.modules import modules_of
from transformer_zoo import NAMES, make


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
