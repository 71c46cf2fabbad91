"""A recorded pass is repeated on the doubled batch: the same masks and statistics for both halves."""

import pytest
import torch
from torch import nn

from excite._core.intercept.affine import Names
from excite._core.replay.passes import Pass, PerturbedPass, Tape
from excite.errors import ModelError


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(nn.functional.dropout(self.norm(self.first(x)), 0.5, self.training))


def recorded(model, x):
    names, tape = Names(model), Tape(len(x))
    with Pass(names, tape, record=True) as clean:
        output = model(x)
    clean.finish()
    return names, tape, output


def test_both_halves_repeat_the_clean_pass():
    torch.manual_seed(0)
    model, x = Noisy(), torch.randn(5, 3)
    names, tape, output = recorded(model, x)
    calibration = PerturbedPass(names, tape, frozenset(), calibrate=True)
    with calibration:
        model(torch.cat([x, x]))
    tape.layouts = calibration.layouts
    with PerturbedPass(names, tape, frozenset()) as repeated:
        twice = model(torch.cat([x, x]))
    repeated.finish()
    torch.testing.assert_close(twice, torch.cat([output, output]))


@pytest.mark.parametrize("precision", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("affine", [True, False])
def test_normalization_is_repeated_in_any_precision(precision, affine):
    model, x = nn.BatchNorm1d(3, affine=affine).to(precision), torch.randn(50, 3).to(precision)
    names, tape, output = recorded(model, x)
    with PerturbedPass(names, tape, frozenset(), copies=1) as repeated:
        again = model(x)
    repeated.finish()
    assert again.dtype == output.dtype == precision
    torch.testing.assert_close(again, output)
    rounding = 2 * torch.finfo(precision).eps  # of the normalized values, some of which are differences close to zero
    expected = nn.BatchNorm1d(3, affine=affine).to(precision)(x)
    torch.testing.assert_close(output, expected, rtol=rounding, atol=rounding)


def test_inputs_of_registered_calls_are_moved():
    model, x = nn.Linear(3, 1), torch.randn(5, 3)
    names, tape = Names(model), Tape(5)
    tape.shapes, tape.layouts = [("weight", x.shape)], [None]
    moves = {"weight": lambda signal: signal + 1}
    with PerturbedPass(names, tape, frozenset({"weight"}), moves, copies=1):
        torch.testing.assert_close(model(x), nn.functional.linear(x + 1, model.weight, model.bias))


def test_another_path_is_refused():
    model, x = Noisy(), torch.randn(5, 3)
    names, tape, _ = recorded(model, x)
    hidden = torch.randn(5, 8)
    with PerturbedPass(names, tape, frozenset(), copies=1) as repeated:
        model.last(hidden)
    with pytest.raises(ModelError, match="drew other random numbers"), PerturbedPass(names, tape, frozenset()):
        torch.randn(5)
    with pytest.raises(ModelError, match="another path"):
        repeated.finish()
