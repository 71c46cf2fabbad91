"""The first affine layers of a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import excite
from excite.errors import ModelError
from excite.probes import Every, Trajectory, trajectory
from models import build
from probes.bias_trajectory.trainings import Training


@pytest.mark.parametrize("kind", ["bias only", "no bias", "in place", "checkpointed"])
def test_kinds_of_first_layers(kind):
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(5, 6, bias=kind != "no bias"), nn.Linear(6, 1)
            self.act = nn.ReLU(inplace=kind == "in place")
            if kind == "bias only":
                self.one.weight.requires_grad_(False)

        def body(self, x):
            return self.two(self.act(self.one(x)))

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False) if kind == "checkpointed" else self.body(x)

    model, x = Net().double(), build("mlp")[1]
    expected = trajectory(model, x)["one"]
    with Training(model, x, Trajectory(Every(1))) as t:
        values = t.step(x, torch.ones(4, 1, dtype=torch.float64))
    assert values["mean/one"] == pytest.approx(expected.mean, rel=1e-12)
    assert values["samples/one"] == 4
    assert ("raw/one" in values) == (kind != "no bias")


@pytest.mark.parametrize("name", ["folded", "folded-time-first"])
def test_layers_without_a_sample_axis_are_refused(name):
    model, x = build(name)
    with pytest.raises(ModelError, match="'enter': samples cannot be separated"):
        excite.watch(model, example=x, probes=[Trajectory()], strict=True)


def test_a_merged_batch_axis_is_named():
    class Rows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.nn.Linear(3, 2)

        def forward(self, x):
            return self.one(x.view(-1, x.size(-1))).view(*x.shape[:-1], 2)

    with pytest.raises(ModelError, match="first axis merges the batch with 5 places per sample"):
        excite.watch(Rows(), example=torch.randn(4, 5, 3), probes=[Trajectory()], strict=True)
