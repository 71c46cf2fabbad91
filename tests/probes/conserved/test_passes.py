"""Autocast in the user's forward passes widens the tolerance."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from excite.probes import conservation
from excite.wiring import trace


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("penalty", [0.0, 0.3])
def test_autocast_alone_is_not_flagged(penalty: float, inside: bool) -> None:
    """Gradients of bfloat16 obey the laws of float32 weights to the precision of bfloat16; a penalty shows beyond it."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.LeakyReLU()]
    model = nn.Sequential(*layers, nn.Linear(32, 4))
    x, y = torch.randn(256, 8), torch.randint(4, (256,))
    optimizer = SGD(model.parameters(), 0.3, momentum=0.9, weight_decay=5e-4)
    cast = torch.autocast("cpu", torch.bfloat16)
    wiring = trace(model, x[:4])
    if inside:  # as some training libraries do
        model.forward = cast(model.forward)  # type: ignore[method-assign, assignment]
    with conservation(model, optimizer, wiring=wiring) as ledger:
        copied = copy.deepcopy(model)
        for step in range(60):
            some = torch.randint(256, (32,), generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
                output = model(x[some])
            loss = F.cross_entropy(output.float(), y[some]) + penalty * model[3].weight.square().sum()  # type: ignore[union-attr, operator]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        reading = ledger.read()
    assert reading.holds == (penalty == 0)
    assert max(entry.relative for entry in reading.entries) > reading.tolerance  # float32 would not leave as much
    copied(x)
    assert not any(module._forward_pre_hooks for module in model.modules())
