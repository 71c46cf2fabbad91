"""The choice of probes and schedules."""

import pytest
import torch
from torch import nn

import excite
from excite.probes import Budget, Every
from models import build


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
