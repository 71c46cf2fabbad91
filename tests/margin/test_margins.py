"""Margins against a dense grid in the plane, and what is refused."""

import math

import pytest
import torch
from torch import Tensor, nn

from excite import ExciteError, PersistentExcitation, margins

NORMS = ["inf", "2"]


@pytest.fixture(scope="module")
def trained():
    """A small network that fits two moons, in float64."""
    from excite.data import load

    data = load("moons", train=200, test=60)
    x, y = data.x_train.double(), data.y_train
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    excitation = PersistentExcitation(model, 0)
    for _ in range(300):
        optimizer.zero_grad()
        excitation.loss(x, y).backward()
        optimizer.step()
    return model, data.x_test.double(), data.y_test


@pytest.mark.parametrize("norm", NORMS)
def test_margins_of_a_plane_model_agree_with_a_dense_grid(trained, norm):
    model, x, y = trained
    found = margins(model, x, y, norm=norm)
    assert found.trusted, found.flags
    angles = torch.linspace(0, 2 * math.pi, 721, dtype=torch.float64)
    rays = torch.stack([angles.cos(), angles.sin()], 1)
    rays = rays / rays.norm(p=float(norm), dim=1, keepdim=True)
    radii = torch.linspace(0, 2, 801, dtype=torch.float64)
    for i in range(0, len(x), 3):
        grid = x[i] + radii[:, None, None] * rays
        flipped = (model(grid.reshape(-1, 2)).reshape(801, 721) > 0.5).long() != y[i]
        hit = flipped.any(1)
        exact = radii[hit.long().argmax()] if hit.any() else math.inf
        assert found.values[i] <= exact * 1.01 + 1e-9
        assert found.values[i] >= exact - 0.003


def call(x=None, y=None, model=None, **options):
    x = torch.zeros(4, 5) if x is None else x
    return margins(model or nn.Linear(5, 1), x, torch.zeros(4, dtype=torch.long) if y is None else y, **options)


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).detach()


BAD = {
    "norm": (lambda: call(norm="1"), "unknown norm '1'"),
    "labels out of range": (lambda: call(y=torch.tensor([0, 1, 2, 0])), "2"),
    "labels for classes": (lambda: call(model=nn.Linear(5, 3), y=torch.tensor([0, 1, 3, 0])), "3"),
    "label shape": (lambda: call(y=torch.zeros(3, dtype=torch.long)), "shape"),
    "fractional labels": (lambda: call(y=torch.full((4,), 0.5)), "0.5|integer|whole"),
    "outside bounds": (lambda: call(torch.full((4, 5), 2.0), bounds=(-1, 1)), "bounds"),
    "bounds upside down": (lambda: call(bounds=(1, -1)), "bounds"),
    "nan": (lambda: call(torch.full((4, 5), math.nan)), "finite|NaN"),
    "integers": (lambda: call(torch.zeros(4, 5, dtype=torch.long)), "int64"),
    "empty": (lambda: call(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long)), "at least one input"),
    "no gradient path": (lambda: call(model=Detached()), "gradient"),
    "steps": (lambda: call(steps=0), "steps"),
    "threshold": (lambda: call(threshold=math.nan), "threshold"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_reason(case):
    action, message = BAD[case]
    with pytest.raises(ExciteError, match=message) as caught:
        action()
    assert "\n" not in str(caught.value)
