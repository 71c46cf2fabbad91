"""Measures of a whole ledger."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from excite.probes import conservation
from excite.probes.conserved.update_terms import PARTS
from excite.studies.invariances.conservation_measures import (
    balances,
    forgotten,
    fractions,
    growth,
    imbalance,
    rate_of_decay,
    sizes,
)


@pytest.mark.slow
def test_measures_of_a_network_that_only_decays() -> None:
    """Without gradients imbalance is forgotten at decay's own rate, and nothing else happens."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    for setting in ({"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}, {}):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.02, **setting)
        with conservation(model, optimizer, x) as ledger:
            start = balances(ledger.read(), dict(model.named_parameters()))
            for _ in range(600):
                optimizer.zero_grad()
                (0 * model(x)).sum().backward()
                optimizer.step()
            report = ledger.read()
        apart, left = imbalance(report)
        assert apart == pytest.approx(left, rel=1e-9)
        assert forgotten(left, rate_of_decay(optimizer), 600) == pytest.approx(1, abs=0.02)
        assert growth(report) == pytest.approx(left, rel=1e-9)
        assert balances(report, dict(model.named_parameters())) == pytest.approx(start, rel=1e-9)
        found = sizes(report)
        assert found["decay"] == pytest.approx(found["drift"], rel=1e-9)
        assert fractions(report) == pytest.approx({term: float(term == "decay") for term in PARTS}, abs=1e-9)
