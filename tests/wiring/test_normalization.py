"""What is measured during training is the function that training changes: statistics of the example, frozen ones as they are."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excite.wiring.normalization import as_trained
from models import build, same_state, state_of

KINDS = {
    "BatchNorm1d": lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)),
    "BatchNorm2d": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 2)),
    "BatchNorm3d": lambda: nn.Sequential(nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 3, 1)),
    "momentum=None": lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7, momentum=None), nn.ReLU(), nn.Linear(7, 3)),
    "no affine": lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7, affine=False), nn.ReLU(), nn.Linear(7, 3)),
    "no running": lambda: nn.Sequential(
        nn.Linear(5, 7), nn.BatchNorm1d(7, track_running_stats=False), nn.ReLU(), nn.Linear(7, 3)
    ),
    "InstanceNorm2d": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.ReLU(), nn.Conv2d(4, 3, 2)
    ),
}  # fmt: skip
SHAPES = {"BatchNorm2d": (2, 6, 6), "InstanceNorm2d": (2, 6, 6), "BatchNorm3d": (2, 4, 4, 4)}


class Own(nn.Module):
    """A normalization of the user's own, by a bare call."""

    def __init__(self, follows: bool) -> None:
        super().__init__()
        self.follows = follows
        self.register_buffer("running_mean", torch.randn(7))
        self.register_buffer("running_var", torch.rand(7) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, training=self.training and self.follows)


def made(kind: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = KINDS[kind]().double()
    return model, torch.randn(6, *SHAPES.get(kind, (5,)), dtype=torch.float64) * 3 + 1


def by_training(model: nn.Module, x: Tensor) -> Tensor:
    """What an ordinary training pass gives; the models here have no dropout."""
    with torch.no_grad():
        return copy.deepcopy(model).train()(x)


def measured(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, str]]:
    with as_trained(model, x) as statistics, torch.no_grad():
        output = model(x)
    return output, dict(statistics.sources)


def deployed(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).eval()(x)


@pytest.mark.parametrize("kind", KINDS)
def test_the_pass_is_that_of_training_and_leaves_no_trace(kind: str) -> None:
    model, x = made(kind)
    before = state_of(model)
    found, sources = measured(model, x)
    assert same_state(before, state_of(model))
    assert list(sources.values()) == ["example"]
    assert torch.allclose(found, by_training(model, x), rtol=1e-12, atol=1e-12)
    if kind != "no running":
        assert not torch.allclose(found, deployed(model, x), rtol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_ones_keep_their_running_statistics(kind: str) -> None:
    model, x = made(kind)
    model[1].eval()  # in a model that trains
    found, sources = measured(model, x)
    assert list(sources.values()) == ["example" if kind == "no running" else "running"]
    assert torch.allclose(found, deployed(model, x), rtol=1e-12, atol=1e-12)


def test_statistics_are_constants_so_that_samples_stay_apart() -> None:
    model, x = made("BatchNorm1d")
    leaf = x.clone().requires_grad_()
    with as_trained(model, x), torch.enable_grad():
        output = model(leaf)
        (gradient,) = torch.autograd.grad(output[0].sum(), leaf)
    assert bool((gradient[1:] == 0).all())
    calibrated = copy.deepcopy(model).eval()
    with torch.no_grad():
        z = model[0](x)
    calibrated[1].running_mean, calibrated[1].running_var = z.mean(0), z.var(0, correction=0)
    assert torch.allclose(calibrated(x), output, rtol=1e-12, atol=1e-12)
    (expected,) = torch.autograd.grad(calibrated(leaf)[0].sum(), leaf)
    assert torch.allclose(gradient, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("follows", [True, False])
def test_bare_calls_count_as_their_code_says(follows: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), Own(follows), nn.Linear(7, 3)).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    before = state_of(model)
    for _ in range(2):  # the second time it is known
        found, sources = measured(model, x)
        assert sources == {"1": "example" if follows else "running"}
        assert torch.allclose(found, by_training(model, x), rtol=1e-12, atol=1e-12)
    assert same_state(before, state_of(model))
    model.eval()
    found, sources = measured(model, x)
    assert torch.equal(found, deployed(model, x))
    assert sources == {"1": "running"}


def test_one_value_per_channel_falls_back_to_running_statistics() -> None:
    model, x = made("BatchNorm1d")
    found, sources = measured(model, x[:1])
    assert torch.equal(found, deployed(model, x[:1]))
    assert sources == {"1": "few"}
    model, x = made("BatchNorm2d")  # one image has many values per channel
    found, sources = measured(model, x[:1])
    assert torch.allclose(found, by_training(model, x[:1]), rtol=1e-12, atol=1e-12)
    assert sources == {"1": "example"}


def test_synchronized_ones_use_the_example_of_this_process() -> None:
    model, x = made("BatchNorm2d")
    expected = by_training(model, x)
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    found, sources = measured(synchronized, x)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    assert sources == {"1": "example"}


def test_dropout_is_off_and_half_precision_works() -> None:
    model, x = build("batchnorm")
    model.insert(3, nn.Dropout(0.5))
    with as_trained(model, x), torch.no_grad():
        assert torch.equal(model(x), model(x))
    model, x = model.to(torch.bfloat16), x.to(torch.bfloat16)
    with as_trained(model, x) as statistics, torch.no_grad():
        assert model(x).dtype == torch.bfloat16
    assert statistics.sources == {"1": "example"}
    model, x = model.float(), x.float()
    with as_trained(model, x), torch.no_grad(), torch.autocast("cpu"):
        assert bool(model(x).isfinite().all())
