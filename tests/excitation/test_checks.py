"""Inputs of the training methods: bounds, dtypes, names of layers."""

import pytest
import torch
from torch import nn

from excite.errors import InputError, ModelError
from excite.excitation.checks import check_fraction, check_input, possible_layers


def test_inputs_must_lie_within_the_bounds():
    check_input(torch.zeros(2, 3), True, (-1, 1))
    with pytest.raises(InputError, match="within bounds"):
        check_input(torch.full((2, 3), 2.0), True, (-1, 1))
    with pytest.raises(InputError, match="do not broadcast"):
        check_input(torch.zeros(2, 3), True, (torch.zeros(4), torch.ones(4)))


def test_only_floating_point_inputs_can_be_perturbed():
    tokens = torch.zeros(2, 3, dtype=torch.long)
    check_input(tokens, False, None)
    with pytest.raises(InputError, match="layers='all'"):
        check_input(tokens, True, None)


def test_names_of_weights_and_modules_are_possible_layers():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1)))
    assert {"0", "1.0", "1"} <= set(possible_layers(model))
    with pytest.raises(ModelError, match="no affine layer"):
        possible_layers(nn.ReLU())


def test_a_fraction_is_between_0_and_1():
    assert check_fraction(0.5) == 0.5
    with pytest.raises(InputError, match="advance"):
        check_fraction(1.5)
