"""Functions of which PyTorch has no derivative."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from excite.errors import ModelError
from excite.lipschitz import along, local


class Rounding(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.enter, self.function, self.head = nn.Linear(3, 4), function, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(torch.relu(self.enter(x))))


FLOOR = {
    "//": lambda h: h + h // 0.5,
    "floor_divide": lambda h: h + torch.floor_divide(h, 0.5),
    "by a tensor": lambda h: h + h.floor_divide(torch.full((), 0.5, dtype=h.dtype)),
}


@pytest.mark.parametrize("name", FLOOR)
def test_floor_division_is_the_division_that_rounds_down(name: str) -> None:
    torch.manual_seed(0)
    model = Rounding(FLOOR[name]).double()
    same = Rounding(lambda h: h + torch.div(h, 0.5, rounding_mode="floor")).double()
    same.load_state_dict(model.state_dict())
    start, end = torch.randn(2, 3, 3, dtype=torch.float64)
    found, expected = along(model, start, end), along(same, start, end)
    assert torch.equal(found.values, expected.values)
    assert all(torch.equal(a, b) for a, b in zip(found.breaks, expected.breaks))
    assert torch.equal(local(model, start), local(same, start))


def test_functions_without_a_derivative_are_refused_in_one_line() -> None:
    model = Rounding(lambda h: torch.add(h, 1.0, out=torch.empty_like(h))).requires_grad_(False)
    for measure, message in (
        (lambda x: along(model, x, -x), r"linear pieces.*add\.out"),
        (lambda x: local(model, x), r"that PyTorch can differentiate.*out="),
    ):
        with pytest.raises(ModelError, match=message) as raised:
            measure(torch.ones(2, 3))
        assert "\n" not in str(raised.value)
