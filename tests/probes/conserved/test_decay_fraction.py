"""The share of momentum buffers that is due to weight decay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from excite.probes import conservation
from models import build
from probes.conserved.trainings import hidden_laws, snapshot, squared


def test_decay_through_the_momentum_buffer_counts_as_decay() -> None:
    """Small weights that the data does not move: all the drift is decay's, with momentum 0.9 nine tenths of it delayed."""
    for setting in ({}, {"dampening": 0.5}, {"nesterov": True}):
        model, x = build("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1, **setting)  # type: ignore[arg-type]
        with conservation(model, optimizer, x) as ledger:
            for _ in range(40):
                optimizer.zero_grad()
                (0.0 * squared(model, x)).backward()
                optimizer.step()
            for entry in ledger.read().entries:
                assert entry.share("decay") == pytest.approx(1, abs=1e-12)
                assert entry.moved > 1e-2
                assert entry.relative < 1e-13


def test_decay_is_right_if_intermittent_or_a_weight_is_skipped() -> None:
    """v_d goes on when decay is switched off, and stands still for a parameter without a gradient."""
    model, x = build("mlp")
    last = [p for k, p in model.named_parameters() if k.startswith("4")]
    first = [p for k, p in model.named_parameters() if not k.startswith("4")]
    optimizer = torch.optim.SGD([{"params": first, "weight_decay": 0.2}, {"params": last}], lr=0.02, momentum=0.8)
    names = {id(p): k for k, p in model.named_parameters()}
    v: dict[str, Tensor] = {}
    expected = torch.zeros(6, dtype=torch.float64)
    with conservation(model, optimizer, x) as ledger:
        for step in range(8):
            optimizer.param_groups[0]["weight_decay"] = 0.2 if step < 4 else 0.0
            optimizer.zero_grad()
            squared(model, x).backward()
            if step in (0, 5):
                last[0].grad = None
            w, g = snapshot(model), {k: p.grad for k, p in model.named_parameters()}
            for group in optimizer.param_groups:
                for p in group["params"]:
                    k = names[id(p)]
                    if g[k] is not None:
                        e = group["weight_decay"] * w[k]
                        v[k] = 0.8 * v[k] + e if k in v else e
            still = {k for k in w if g[k] is None}
            plain = {k: w[k] if k in still else w[k] - 0.02 * g[k] for k in w}  # type: ignore[operator]
            decayed = {k: plain[k] if k in still else plain[k] - 0.02 * v[k] for k in w}
            expected += hidden_laws(model, decayed)[1] - hidden_laws(model, plain)[1]  # type: ignore[arg-type]
            optimizer.step()
        entry = ledger.read()["2"]
    torch.testing.assert_close(entry.terms["decay"], expected, rtol=0, atol=1e-13)
    assert expected.abs().max() > 1e-3
