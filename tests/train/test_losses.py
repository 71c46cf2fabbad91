"""The plain loss against its formula, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from excite.errors import InputError, ModelError
from excite.train import squared_error


@pytest.mark.parametrize("shape", [(5,), (5, 1)])
def test_squared_error_is_the_batch_mean(shape: tuple[int, ...]) -> None:
    model, x, y = nn.Linear(3, 1), torch.randn(5, 3), torch.randn(shape)
    expected = sum(float((model(point) - label).detach()) ** 2 for point, label in zip(x, y.reshape(-1))) / 5
    assert float(squared_error(model)(x, y).detach()) == pytest.approx(expected, rel=1e-5)


def test_an_output_can_be_chosen() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"a": x[:, 0], "b": x[:, 1]}

    x = torch.randn(4, 2)
    assert torch.equal(squared_error(Two(), "b")(x, torch.zeros(4)), x[:, 1].square().mean())


def test_other_shapes_are_refused() -> None:
    x = torch.randn(4, 3)
    with pytest.raises(ModelError, match="one output per sample"):
        squared_error(nn.Linear(3, 2))(x, torch.zeros(4))
    with pytest.raises(InputError, match="one label per sample"):
        squared_error(nn.Linear(3, 1))(x, torch.zeros(5))
