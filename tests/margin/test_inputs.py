"""Options and inputs of `margins`."""

import warnings

import pytest
import torch

from excite.errors import InputError, ModelError
from excite.margin.inputs import (
    SearchOptions,
    check_decisions,
    check_labels,
    check_margin_layers,
    check_options,
    check_outputs,
    check_points,
    points_within,
)

BAD = [{"steps": 1}, {"restarts": 0}, {"evidence": 1}, {"certify": "yes"}, {"lipschitz": -1.0}, {"seed": -1}]


@pytest.mark.parametrize("values", BAD, ids=lambda values: next(iter(values)))
def test_options_out_of_range_are_refused(values):
    (name,) = values
    with pytest.raises(InputError, match=name):
        SearchOptions(**values)


def test_no_options_are_the_defaults():
    assert check_options(None) == SearchOptions()
    with pytest.raises(InputError, match="SearchOptions"):
        check_options({"steps": 3})


def test_layers_that_do_not_go_with_other_settings():
    assert check_margin_layers(["0"], True, SearchOptions()) == ("0",)
    with pytest.raises(InputError, match="relative"):
        check_margin_layers("input", True, SearchOptions())
    with pytest.raises(InputError, match="input only"):
        check_margin_layers("all", False, SearchOptions(lipschitz=1.0))


def test_points_are_copied_and_lie_within_the_bounds():
    x = torch.zeros(2, 3)
    assert check_points(x) is not x
    low, high = points_within((-1, 1), x)
    assert (float(low), float(high)) == (-1, 1)
    with pytest.raises(InputError, match="2 of 2 points lie outside"):
        points_within((1, 2), x)


def test_outputs_tell_the_number_of_classes():
    x = torch.zeros(4, 3)
    assert check_outputs(torch.zeros(4), x) == 1
    assert check_outputs(torch.zeros(4, 5), x) == 5
    with pytest.raises(ModelError, match="shape"):
        check_outputs(torch.zeros(3, 5), x)


def test_labels_of_other_types_are_converted_or_refused():
    x = torch.zeros(2, 3)
    assert check_labels([0, 1], x, 1).tolist() == [0, 1]
    assert check_labels(torch.tensor([[0.0], [1.0]]), x, 1).tolist() == [0, 1]
    with pytest.raises(InputError, match="integer labels"):
        check_labels(torch.tensor([0.0, 1.0]), x, 3)


def test_labels_that_the_model_never_decides_for_are_named():
    f, labels = torch.eye(10)[torch.tensor([7, 5] * 10)], torch.tensor([0, 1] * 10)
    with pytest.warns(UserWarning, match="10 outputs.* labels 0, 1, classes 5, 7. All margins are 0"):
        check_decisions(f, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_decisions(f, torch.tensor([0, 5] * 10))
        check_decisions(f[:6], labels[:6])
