"""The tables of torch's functions: what belongs together is found under all of its names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from excite._core.intercept.functions import MOVING, OPENED, REARRANGING, methods


def test_methods_finds_functions_and_methods() -> None:
    assert set(methods("add", "view")) == {torch.add, Tensor.add, Tensor.view}
    assert MOVING < REARRANGING


class Recorded(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_inner_calls_of_an_opened_function_are_seen() -> None:
    x = torch.zeros(3, 4)
    with Recorded() as hidden:
        F.gumbel_softmax(x)
    with Recorded() as opened:
        OPENED[F.gumbel_softmax](x)
    assert hidden.names[0] == "gumbel_softmax"
    assert "gumbel_softmax" not in opened.names
    assert "softmax" in opened.names
