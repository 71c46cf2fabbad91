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


class Conv1D(nn.Module):
    """As in Transformers: samples and tokens are merged for the product, and separate in what the module returns."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(linear.weight.detach().T.clone()),
            nn.Parameter(linear.bias.detach().clone()),
        )

    def forward(self, x):
        z = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return z.view(*x.shape[:-1], -1)


class Sequences(nn.Module):
    def __init__(self, merged):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.head = nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(4, 1)
        if merged:
            self.one, self.two = Conv1D(self.one), Conv1D(self.two)

    def forward(self, x):
        return self.head(torch.relu(self.two(torch.relu(self.one(x)))).mean(1))


@pytest.mark.parametrize("layers", ["first", "all"])
def test_modules_may_separate_merged_samples(layers):
    x = torch.randn(4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    merged, plain = (Sequences(how).double() for how in (True, False))
    found, expected = (trajectory(model, x, layers=layers) for model in (merged, plain))
    assert list(found) == list(expected)
    for name, updates in expected.items():
        assert torch.allclose(found[name].values, updates.values, rtol=1e-12)
        assert torch.allclose(found[name].lipschitz, updates.lipschitz, rtol=1e-12)
        assert found[name].sigma == pytest.approx(updates.sigma, rel=1e-12)
        assert found[name].labels == updates.labels
    values = []
    for model in (merged, plain):
        with Training(model, x, Trajectory(Every(1), layers=layers, bounds_every=1, max_samples=3)) as training:
            steps = [training.step(x, torch.ones(4, 1, dtype=torch.float64)) for _ in range(3)]
            longer = training.step(torch.cat([x, x], 1), torch.ones(4, 1, dtype=torch.float64))
        values.append({(i, name): value for i, step in enumerate([*steps, longer]) for name, value in step.items()})
    assert values[0] == pytest.approx(values[1], rel=1e-10, nan_ok=True)


def test_tokens_in_front_of_samples_are_not_taken_for_samples():
    class TimeFirst(Sequences):
        def forward(self, x):
            return super().forward(x.transpose(0, 1)).expand(len(x), 1)

    with pytest.raises(ModelError, match="samples cannot be separated"):
        trajectory(TimeFirst(True).double(), torch.randn(4, 2, 5, dtype=torch.float64))


def test_a_merged_batch_axis_is_named():
    class Rows(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.nn.Linear(3, 2)

        def forward(self, x):
            return self.one(x.view(-1, x.size(-1))).view(*x.shape[:-1], 2)

    with pytest.raises(ModelError, match="first axis merges the batch with 5 places per sample"):
        excite.watch(Rows(), example=torch.randn(4, 5, 3), probes=[Trajectory()], strict=True)
