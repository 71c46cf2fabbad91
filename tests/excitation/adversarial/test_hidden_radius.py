"""The radius of each hidden layer: numbers, dicts by layer name, stages of either, and a controller."""

import pytest
import torch
from torch import nn

from excite import Relative, Stages
from excite.errors import InputError
from excite.excitation.adversarial.hidden_radius import (
    check_hidden_radius,
    hidden_radius_of,
    named_layers,
    named_sites,
    stage_of,
)
from excite.excitation.radius_control import GapController

MODEL = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def test_a_number_holds_for_every_chosen_layer():
    assert hidden_radius_of(0.1, "all", "2", 0.0) == 0.1
    assert hidden_radius_of(0.1, ["2"], "0", 0.0) == 0.0
    assert hidden_radius_of(0.1, ["2"], "2#2", 0.0) == 0.1


def test_a_dict_holds_for_layers_and_their_later_calls():
    radius = {"2": 0.1, "2#3": 0.3}
    assert [hidden_radius_of(radius, "all", name, 0.0) for name in ("0", "2", "2#2", "2#3")] == [0.0, 0.1, 0.1, 0.3]
    assert named_layers(radius) == named_layers(Stages(radius)) == ["2", "2#3"]
    assert named_sites(radius, ["0:output"]) == ["2", "2#3", "0:output"]


def test_stages_grow_to_the_full_radius():
    assert [hidden_radius_of(Stages(0.3), "all", "2", p) for p in (0.0, 0.5, 1.0)] == pytest.approx([0, 0.2, 0.3])
    assert stage_of(Stages(0.3), 0.0) == (0.3, 0.0)


def test_the_tensor_of_a_controller_is_handed_on():
    controller = GapController((torch.zeros(1, 2), torch.zeros(1)), 0.1, 1)
    assert hidden_radius_of(controller, "all", "2", 0.0) is controller.factor


@pytest.mark.parametrize(
    ("radius", "held_out", "message"),
    [
        (Stages(Relative(0.1)), None, "relative already"),
        ({"head": 0.1}, None, "unknown layer 'head'"),
        ({}, None, "no layer has a radius above 0"),
        ({"0": 0.0}, None, "no layer has a radius above 0"),
        (-0.1, None, "hidden_radius"),
        (0.1, (1, 2), "hidden_radius='auto' only"),
    ],
)
def test_bad_hidden_radii_are_refused(radius, held_out, message):
    with pytest.raises(InputError, match=message):
        check_hidden_radius(radius, ["0", "2"], held_out, MODEL)
