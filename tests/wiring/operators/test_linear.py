"""Linear layers, however they are written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from excite.lipschitz import bound
from excite.wiring import path_count, trace

WRITTEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: nn.functional.linear(x, w),
    "matmul": lambda x, w: x @ w.T,
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "addmm": lambda x, w: torch.addmm(torch.zeros(3).double(), x, w.T),
}


class Written(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.w, self.head = how, nn.Parameter(torch.randn(3, 4)), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(WRITTEN[self.how](x, self.w)))


@pytest.mark.parametrize("how", WRITTEN)
def test_every_spelling_has_the_same_rows(how: str) -> None:
    model, x = Written(how).double(), torch.zeros(2, 4).double()
    if how != "addmm":  # a constant is added, even if it is zero
        (group,) = trace(model, x).groups
        assert (group.law, group.channels, group.producers[0].parameter) == ("channel", 3, "w")
    if how != "einsum":
        assert path_count(model, x).total == 12
        expected = float(torch.linalg.matrix_norm(model.w, 2) * torch.linalg.matrix_norm(model.head.weight, 2))
        assert bound(model, x, "2").value == pytest.approx(expected, rel=1e-12)
