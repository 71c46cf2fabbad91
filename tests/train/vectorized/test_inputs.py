"""What an ensemble refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from excite.errors import ExciteError, InputError, ModelError
from excite.train import ensemble
from train.vectorized.ensemble_networks import F32, X, Y, mlp


def single(*parts: nn.Module) -> list[nn.Module]:
    return [nn.Sequential(*parts)]


def hooked() -> nn.Module:
    model = mlp((3, 4, 1), dtype=torch.float32)
    model[0].register_forward_hook(lambda *a: None)
    return model


def frozen() -> nn.Module:
    model = mlp((3, 4, 1), dtype=torch.float32)
    model[2].weight.requires_grad_(False)
    return model


def tied() -> nn.Module:
    model = mlp((3, 3, 3, 1), dtype=torch.float32)
    model[2].weight = model[0].weight
    return model


SHARED = nn.Linear(3, 1)


@pytest.mark.parametrize(
    ("models", "change", "match"),
    [
        ([], {}, "at least one network"),
        ([mlp((3, 4, 1), **F32), mlp((3, 5, 1), **F32)], {}, r"network 1 has sizes \(3, 5, 1\)"),
        ([mlp((3, 4, 1), **F32), mlp((3, 4, 1), nn.Tanh(), **F32)], {}, r"activations \(Tanh\(\),\) where"),
        ([mlp((3, 4, 1), **F32), mlp((3, 4, 1))], {}, "dtype torch.float64 where"),
        (single(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)), {}, "1 \\(BatchNorm1d\\) does not fit"),
        (single(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 1)), {}, "Dropout"),
        (single(nn.Linear(3, 4), nn.Linear(4, 1)), {}, "does not fit"),
        (single(nn.Linear(3, 2)), {}, "at the end one output"),
        (single(nn.Linear(3, 1), nn.ReLU()), {}, "at the end one output"),
        (single(nn.ReLU()), {}, "does not fit"),
        (single(), {}, "an ensemble takes"),
        ([nn.Sequential(SHARED), nn.Sequential(SHARED)], {}, "must not share"),
        ([tied()], {}, "must not share"),
        ([hooked()], {}, "hooks"),
        ([frozen()], {}, "everything is trained"),
        ([mlp((3, 4, 1), sigmoid=True, **F32)], {}, "trained with 'bce'"),
        (None, {"loss": "squared"}, "'half-squared' or 'bce'; got 'squared'"),
        (None, {"loss": "bce"}, "between 0 and 1"),
        (None, {"epochs": 0}, "epochs: expected a whole number"),
        (None, {"batch": True}, "batch: expected a whole number"),
        (None, {"window": 0}, "window: expected"),
        (None, {"lr": [0.1]}, "one for each of the 2"),
        (None, {"lr": [0.1, 0.2, 0.3]}, "one for each of the 2"),
        (None, {"lr": 0.0}, "positive"),
        (None, {"momentum": -1.0}, "momentum: expected"),
        (None, {"seeds": [1]}, "seeds: expected one for each"),
        (None, {"seeds": [1, -1]}, "seed: expected"),
        (None, {"layers": "last"}, "'first' or 'all'"),
        (None, {"x": X[:, :2]}, "points of 3 numbers"),
        (None, {"y": Y[:5]}, "a target for each"),
        (None, {"x": torch.randn(3, 6, 3)}, "one set for each of the 2"),
        (None, {"x": X / 0}, "x has values that are not finite"),
        (None, {"x": X.long()}, "floating point"),
        (None, {"y": Y.tolist()}, "as tensors; got \\(6, 3\\) and list"),
    ],
)  # fmt: skip
def test_bad_input(models: list[nn.Module] | None, change: dict[str, Any], match: str) -> None:
    models = [mlp((3, 4, 1), seed=i, **F32) for i in range(2)] if models is None else models
    before = [copy.deepcopy(m.state_dict()) for m in models]
    settings = {"x": X, "y": Y, "epochs": 1, **change}
    x, y = settings.pop("x"), settings.pop("y")
    with pytest.raises(ExciteError, match=match) as error:
        ensemble(models, x, y, **settings)
    assert isinstance(error.value, InputError | ModelError)
    assert "\n" not in str(error.value)
    for model, state in zip(models, before):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, state[name], rtol=0, atol=0)


def test_a_window_that_would_fill_the_memory() -> None:
    x, y = torch.zeros(1, 2000).expand(1_000_000, -1), torch.zeros(1_000_000)
    model = mlp((3, 2000, 1), **F32)
    with pytest.raises(InputError, match=r"window: 3000000 steps need 24 GB; choose at most \d+$"):
        ensemble([model], x[:1_000_000, :3], y, epochs=3, window=10**9)
