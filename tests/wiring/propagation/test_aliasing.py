"""Operators that write into memory which is read under another name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from excite.errors import ModelError
from excite.lipschitz import bound
from excite.wiring import path_count, trace


class Written(nn.Module):
    def __init__(self, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.write, self.a, self.b = write, nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.write(h.view(-1, 2, 2))
        return self.b(h)


def test_writing_into_a_view_that_is_read_elsewhere_is_noticed() -> None:
    model, x = Written(lambda view: view.add_(view)), torch.zeros(2, 3)
    (group,) = trace(model, x).groups
    assert (group.law, group.why) == ("none", "add_ writes into a tensor that is read elsewhere")
    for measure in (bound, path_count):
        with pytest.raises(ModelError, match="add_ on a tensor that is read elsewhere"):
            measure(model, x)


def test_paths_do_not_change_where_a_relu_is_written_into_a_view() -> None:
    assert path_count(Written(lambda view: view.relu_()), torch.zeros(2, 3)).total == 12
