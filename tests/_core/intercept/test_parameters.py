"""The roles of parameters in a forward pass, and the warning for those without one."""

import warnings

import pytest
import torch
from torch import nn

from excite._core.intercept.affine import AffineMode, Names
from excite._core.intercept.parameters import ABSENT, Roles, account, report


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)
        self.gain, self.unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.norm(self.layer(x)) * self.gain


def roles_of(model):
    mode = AffineMode(Names(model))
    mode.roles = Roles()
    with mode:
        model(torch.randn(2, 3))
    return mode.roles


def test_every_parameter_has_a_role_or_a_reason():
    known, missing = roles_of(Model()).of(Model())
    assert known["layer.weight"] == "weight of layer"
    assert known["layer.bias"] == "bias of layer"
    assert known["norm.weight"] == "normalization"
    assert known["gain"] == "scaling"
    assert missing == {"unused": ABSENT}


def test_the_warning_comes_once_per_model():
    model = Model()
    with pytest.warns(UserWarning, match="unused"):
        report(model, roles_of(model))
    assert account(model) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report(model, account(model))


@pytest.mark.parametrize("repeat", [lambda b, x: b, lambda b, x: b.expand(len(x), 3), lambda b, x: b.repeat(len(x), 1)])
def test_a_repeated_bias_is_a_bias(repeat):
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))

        def forward(self, x):
            return torch.addmm(repeat(self.b, x), x, self.w)

    known, missing = roles_of(Added()).of(Added())
    assert known["w"] == "weight of w"
    assert known["b"].startswith("bias")
    assert missing == {}
