"""Inputs of the training methods: bounds, dtypes, names of layers."""

import pytest
import torch
from torch import nn

from excitation.deferring import deferring
from excite.errors import InputError, ModelError
from excite.excitation.checks import check_fraction, check_input, place_bounds, possible_layers

AT_INPUT = ("layers='input'", "choose layers='all'")
ones = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("x", "bounds", "problem"),
    [
        (ones, None, None),
        (ones, (0, 1), None),
        (ones, (0, torch.ones(3)), None),
        (ones.bfloat16() * 0.1, (0, 0.1), None),  # the bound is rounded as the inputs are
        (ones * torch.nan, None, "expected finite inputs"),
        (ones * torch.inf, (0, 1), "expected finite inputs"),
        (torch.tensor([[1.0, -torch.inf]]), None, "expected finite inputs"),
        ((ones, ones * torch.nan), None, "expected finite inputs"),
        ({"a": ones.long(), "b": ones * torch.nan}, None, "expected finite inputs"),
        (ones.half() * 2, (-1, 1), r"within bounds \(-1, 1\); got values from 2 to 2"),
        (ones, (torch.zeros(3), torch.tensor([1, 0.5, 1])), "within bounds .* got values from 1 to 1"),
        (ones.long() * 9, (0, 5), "within bounds"),
        (torch.zeros(2, 0), None, None),
    ],
)
def test_on_a_gpu_the_same_inputs_are_refused_later(x, bounds, problem):
    later = deferring()
    later.begin(torch.zeros(1))
    check_input(x, None, bounds, later)
    if problem is None:
        check_input(x, None, bounds)
        later.finish()
    else:
        with pytest.raises(InputError, match=problem):
            check_input(x, None, bounds)
        with pytest.raises(InputError, match=f"{problem}.*in call 1 of loss") as raised:
            later.begin(torch.zeros(1))
        assert "\n" not in str(raised.value)


def test_on_a_gpu_shapes_and_types_are_refused_at_once():
    with pytest.raises(InputError, match="do not broadcast"):
        check_input(torch.zeros(2, 3), AT_INPUT, (torch.zeros(4), torch.ones(4)), deferring())
    with pytest.raises(InputError, match="layers='all'"):
        check_input(torch.zeros(2, 3, dtype=torch.long), AT_INPUT, None, deferring())


def test_bounds_are_placed_once_for_each_device_and_precision():
    bounds, placed = (0.0, torch.ones(3)), {}
    assert place_bounds((0, 1), ones, placed) == (0, 1)
    first = place_bounds(bounds, ones.double(), placed)
    assert first[1].dtype == torch.float64
    assert place_bounds(bounds, ones.double(), placed) is first
    assert place_bounds(bounds, ones, placed)[1].dtype == torch.float32
    assert place_bounds((0.0, 2 * torch.ones(3)), ones, placed)[1].tolist() == [2, 2, 2]  # bounds that were replaced


def test_inputs_must_lie_within_the_bounds():
    check_input(torch.zeros(2, 3), AT_INPUT, (-1, 1))
    with pytest.raises(InputError, match="within bounds"):
        check_input(torch.full((2, 3), 2.0), AT_INPUT, (-1, 1))
    with pytest.raises(InputError, match="do not broadcast"):
        check_input(torch.zeros(2, 3), AT_INPUT, (torch.zeros(4), torch.ones(4)))


def test_only_floating_point_inputs_can_be_perturbed():
    tokens = torch.zeros(2, 3, dtype=torch.long)
    check_input(tokens, None, None)
    with pytest.raises(InputError, match="layers='all'"):
        check_input(tokens, AT_INPUT, None)


def test_names_of_weights_and_modules_are_possible_layers():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1)))
    assert {"0", "1.0", "1"} <= set(possible_layers(model))
    with pytest.raises(ModelError, match="no affine layer"):
        possible_layers(nn.ReLU())


def test_a_fraction_is_between_0_and_1():
    assert check_fraction(0.5) == 0.5
    with pytest.raises(InputError, match="advance"):
        check_fraction(1.5)
