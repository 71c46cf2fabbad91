"""Signed sums of rows over the sites of laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from excite.probes import conservation
from models import Heads, build
from probes.conserved.trainings import OPTIMIZERS, snapshot, squared


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_laws_of_products_sum_rows_with_multiplicity(make: Any) -> None:
    """relu(W₁x) · (W₂x), read by W₃, whose output is squared and read by W₄."""
    for penalty in (0.0, 0.01):
        model, x = build("gated")
        optimizer = make(model.parameters())
        with conservation(model, optimizer, x) as ledger:
            for _ in range(4):
                optimizer.zero_grad()
                (squared(model, x) + penalty * model.head.weight.abs().sum()).backward()
                optimizer.step()
            reading = ledger.read()
        w = snapshot(model)
        rows = {k: w[f"{k}.weight"].square().sum(1) + w[f"{k}.bias"].square() for k in ("gate", "up", "down")}
        read = {k: w[f"{k}.weight"].square().sum(0) for k in ("down", "head")}
        expected = {"gate": rows["gate"] - read["down"], "up": rows["up"] - read["down"]}
        expected["down"] = rows["down"] - 2 * read["head"]
        for name, value in expected.items():
            torch.testing.assert_close(reading[name].value, value, rtol=1e-12, atol=1e-12)
            assert reading[name].holds == (penalty == 0 or name != "down")
            assert reading[name].relative < 1e-12 or not reading[name].holds


def test_state_with_numbered_heads_is_read() -> None:
    """States of earlier versions number the laws of a layer: name#2 where there is name/head1 now."""
    torch.manual_seed(0)
    model, x = Heads().double(), torch.randn(4, 3, 8, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with conservation(model, optimizer, x) as ledger:
        model(x).sum().backward()
        optimizer.step()
        state, expected = ledger.state_dict(), ledger.read()["query/head1"].drift
        assert state["laws"][:2] == ["query/head0 matrix 4", "query/head1 matrix 4"]
        state["laws"] = ["query matrix 4", "query#2 matrix 4", "value matrix 4", "value#2 matrix 4", *state["laws"][4:]]
        ledger.load_state_dict(state)
        assert torch.equal(ledger.read()["query/head1"].drift, expected)
