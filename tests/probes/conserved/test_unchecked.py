"""Reasons for which channels have no law that could be checked."""

from __future__ import annotations

import torch
from torch import nn

from excite.probes import conservation
from models import build
from probes.conserved.trainings import train


def test_a_model_without_a_law_says_why() -> None:
    model, x = build("tanh")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with conservation(model, optimizer, x) as ledger:
        train(model, optimizer, x, 2)
        reading = ledger.read()
    assert not reading.entries
    assert not reading.holds
    assert "tanh between 0 and 2 is not positively homogeneous" in str(reading)
    model = nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    model[4].weight.requires_grad_(False)
    reading = conservation(model, torch.optim.SGD(model.parameters(), lr=0.1), x).read()
    assert [f"{u.name}: {u.why}" for u in reading.unchecked] == [
        "0: gelu between 0 and 2 is not positively homogeneous",
        "2: 4.weight does not train",
    ]
    alone = nn.Linear(5, 1).double()
    assert "nothing to check" in str(conservation(alone, torch.optim.SGD(alone.parameters(), lr=0.1), x).read())
