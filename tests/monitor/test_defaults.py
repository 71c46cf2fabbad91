"""The choice of probes and schedules."""

import pytest
import torch
from torch import nn

import excite
from excite.monitor import defaults
from excite.probes import Budget, Every
from models import build
from transformer_zoo import HandGPT


def test_every_is_for_all_or_by_name(tmp_path):
    model, x = build("mlp")
    with excite.watch(model, x, tmp_path / "a", every={"rank": 2, "distance": Every(3)}) as watch:
        schedules = {probe.name: probe.schedule for probe in watch.probes}
    assert (schedules["rank"], schedules["distance"], schedules["loss"]) == (Every(2), Every(3), Every(1))
    with excite.watch(model, x, tmp_path / "b", every=Budget(0.05)) as watch:
        found = {probe.name: probe.schedule for probe in watch.probes}
    assert found["rank"] is found["distance"]
    assert found["loss"] == Every(1)
    with pytest.raises(excite.InputError, match=r"every: there is no probe 'ranks'; there are loss"):
        excite.watch(model, x, every={"ranks": 2})


def test_sharpness_is_left_out_where_no_loss_is_known(tmp_path):
    """Of a classifier with attention that gets no labels; in strict mode a probe that cannot measure would be an error."""
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten(), nn.Linear(24, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with excite.watch(model, torch.randn(4, 3, 8), tmp_path / "run", optimizer=optimizer, strict=True) as watch:
        names = {probe.name for probe in watch.probes}
    assert "log_z" in names
    assert "sharpness" not in names


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["whole", "blocks"])
def test_default_probes_add_no_graph_break(parts):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model, ids = HandGPT("kernel"), torch.randint(17, (4, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = model
    if parts == "whole":
        compiled = torch.compile(model, backend="eager")
    else:
        for block in model.blocks:
            block.compile(backend="eager")
    with excite.watch(compiled, ids, optimizer=optimizer, every=1) as watch:
        assert "trajectory" not in {probe.name for probe in watch.probes}
        for _ in range(2):
            optimizer.zero_grad()
            loss = compiled(ids).square().mean()
            loss.backward()
            optimizer.step()
            watch.step(loss)
    assert sum(counters["graph_break"].values()) == 0
    torch._dynamo.reset()


def test_large_models_are_watched_without_copies_of_all_weights(monkeypatch):
    model, x = build("mlp")
    copies = {"distance", "signs"}
    with excite.watch(model, x) as watch:
        assert copies <= {probe.name for probe in watch.probes}
    monkeypatch.setattr(defaults, "LARGE", 10)
    with excite.watch(model, x) as watch:
        assert not copies & {probe.name for probe in watch.probes}
