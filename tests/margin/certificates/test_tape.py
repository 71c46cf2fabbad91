"""The tape of a model: values, transposed operators, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from excite.errors import ModelError
from excite.margin.certificates.tape import OperatorTape


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * 2 - x / 3
        a, b = (h + x).chunk(2, 1)
        return self.second(torch.cat([a, -b, x.flip(1)], 1))


def test_values_are_those_of_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Dropout(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 2),
    ).eval()  # fmt: skip
    x = torch.randn(5, 1, 8, 8)
    tape = OperatorTape(model, x, None, 5)
    torch.testing.assert_close(tape.values(x)[tape.output].float(), model(x).detach())


def test_affine_rows_are_the_jacobian() -> None:
    torch.manual_seed(0)
    model = Branches().double()
    tape = OperatorTape(model, torch.zeros(1, 6).double(), None, 4)
    sources, constant = tape.affine_rows(tape.output, torch.eye(2).double())
    expected = torch.autograd.functional.jacobian(lambda z: model(z[None])[0], torch.randn(6).double())
    torch.testing.assert_close(sources[tape.input], expected)
    torch.testing.assert_close(constant, model(torch.zeros(1, 6).double())[0].detach())
    norms = tape.coefficient_norms(tape.output, "1")
    torch.testing.assert_close(norms[0], expected.abs().sum(1))


def test_magnitudes_are_absolute_coefficients() -> None:
    torch.manual_seed(0)
    model = Branches().double()
    tape = OperatorTape(model, torch.zeros(1, 6).double(), None, 3)
    spread = torch.rand(3, 6).double()
    values = {tape.input: spread}
    for step in tape.steps.values():
        values[step.node] = tape.call(step, values, magnitude=True)
    jacobian = torch.autograd.functional.jacobian(lambda z: model(z[None])[0], torch.zeros(6).double())
    # paths that cancel each other are added up, so that the spread is at least that of the whole
    assert (values[tape.output] >= spread @ jacobian.abs().T - 1e-12).all()


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * x).sum(1)


@pytest.mark.parametrize(
    ("model", "name"),
    [(Squares(), "mul"), (nn.Softmax(1), "softmax"), (nn.LayerNorm(3), "layer_norm"), (nn.BatchNorm1d(3), "batch")],
)
def test_operators_without_a_bound_are_named(model: nn.Module, name: str) -> None:
    with pytest.raises(ModelError, match=name):
        OperatorTape(model, torch.randn(2, 3), None, 2)
