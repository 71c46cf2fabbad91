"""Arguments of `AdversarialTraining`: what is returned, what is refused."""

import pytest
from torch import nn

from excite import Relative, Stages
from excite.errors import InputError
from excite.excitation import HiddenOptions
from excite.excitation.adversarial.checks import (
    check_awp,
    check_hidden,
    check_hidden_layers,
    check_input_radius,
    check_trades,
    full_radius,
)

MODEL = nn.Sequential(nn.Linear(2, 2))


def test_settings_that_fit_are_returned():
    assert full_radius(check_input_radius(0.1)) == full_radius(check_input_radius(Stages(0.1))) == 0.1
    assert check_hidden(None) == HiddenOptions()
    assert list(check_hidden_layers(["0"], ["0"], MODEL)) == ["0"]
    assert check_awp(0.01, MODEL) == 0.01
    assert check_trades(6, "cross-entropy", True) == 6


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: check_input_radius(Relative(0.1)), "a number or Stages of a number"),
        (lambda: check_hidden({"norm": "2"}), "expected HiddenOptions"),
        (lambda: check_hidden_layers("input", ["0"], MODEL), "leave hidden_radius at 0"),
        (lambda: check_awp(2, MODEL), "awp"),
        (lambda: check_trades(6, "squared", True), "loss='cross-entropy'"),
        (lambda: check_trades(6, "cross-entropy", False), "random_start=True"),
    ],
)
def test_settings_that_do_not_fit_are_refused(check, message):
    with pytest.raises(InputError, match=message):
        check()
