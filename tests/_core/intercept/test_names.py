"""Names of layers by their weights."""

import pytest
import torch
from torch import nn

from excite._core.intercept.names import Names, clean_path, layer_name

PATHS = {
    "0.weight": "0",
    "block.attention.in_proj_weight": "block.attention.in_proj_weight",
    "0.parametrizations.weight.original0": "0",
    "conv.weight_orig": "conv",
    "table": "table",
}


@pytest.mark.parametrize("path", PATHS)
def test_a_layer_is_named_by_the_path_of_its_weight(path):
    assert layer_name(path) == PATHS[path]


def test_wrappers_are_no_part_of_a_path():
    assert clean_path("_orig_mod.0._fsdp_wrapped_module.weight") == "0.weight"


def test_views_of_a_parameter_are_found():
    model = nn.Sequential(nn.Linear(3, 2))
    names = Names(model)
    assert names.parameter(model[0].weight) == "0.weight"
    assert names.parameter(model[0].weight.T) == "0.weight"
    assert names.parameter(torch.zeros(2)) is None
    assert names.of_one["0.weight",] == names.layer(("0.weight",)) == "0"
