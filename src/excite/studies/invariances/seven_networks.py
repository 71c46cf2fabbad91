"""Networks of the seven cases of Theorem 1, and points to train them on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

CASES = {  # words, and the layers whose channels the case is about
    1: ("fully connected", ("a",)),
    2: ("convolutions", ("a",)),
    3: ("inside a residual block", ("Y",)),
    4: ("between free residual blocks", ("U",)),
    5: ("convolution to fully connected", ("a",)),
    6: ("convolution to residual block", ("a",)),
    7: ("residual block and fully connected", ("a", "U")),
}


class Net(nn.Module):
    """The network of a case. Blocks are r(x) = σ(U σ(Y x) + Z x), in case 3 with the identity in place of Z."""

    def __init__(self, case: int, relu: bool):
        super().__init__()
        self.case, self.act = case, nn.ReLU() if relu else nn.Identity()

        def line(before: int, after: int) -> nn.Module:
            return nn.Linear(before, after, bias=False)

        convolves = case in (2, 5, 6)
        self.a: nn.Module = nn.Conv1d(2, 3, 3, bias=False) if convolves else line(4, 5)
        width = 12 if convolves else 5  # of 3 channels, 4 places
        if case == 2:
            self.b: nn.Module = nn.Conv1d(3, 4, 2, bias=False)
            width = 12
        if case in (1, 5):
            self.b = line(width, 4)
            width = 4
        if case in (3, 4, 6, 7):
            after = width if case == 3 else 4
            self.Y, self.U = line(width, 3), line(3, after)
            self.Z = nn.Identity() if case == 3 else line(width, after)
            width = after
        if case == 4:
            self.Y2, self.U2, self.Z2 = line(width, 3), line(3, 4), line(width, 4)
        self.last = line(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.a(x))
        if self.case in (2, 1):
            x = self.act(self.b(x))
        x = x.flatten(1)
        if self.case == 5:
            x = self.act(self.b(x))
        if self.case in (3, 4, 6, 7):
            x = self.act(self.U(self.act(self.Y(x))) + self.Z(x))
        if self.case == 4:
            x = self.act(self.U2(self.act(self.Y2(x))) + self.Z2(x))
        return self.last(x)[:, 0]  # type: ignore[no-any-return]


def start(settings: Mapping[str, Any], seed: int) -> tuple[Net, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Net(settings["case"], settings["relu"]).double()
    shape = (2, 6) if settings["case"] in (2, 5, 6) else (4,)
    x = torch.randn(settings["points"], *shape, generator=generator, dtype=torch.float64)
    y = torch.randint(2, (settings["points"],), generator=generator).double() * 2 - 1
    return model, x, y
