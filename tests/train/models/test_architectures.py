from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from excite.errors import InputError
from excite.train import ARCHITECTURES, build
from excite.train.models.architectures import options_for

SHAPES = {
    "papers-cnn": (3, 32, 32),
    "small-cnn": (1, 8, 8),
    "resnet": (1, 8, 8),
    "preact-resnet": (1, 8, 8),
    "vit": (1, 8, 8),
    "mlp": (2, 3),
    "linear": (5,),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("outputs", [1, 4])
def test_built_from_the_shape_of_the_data(name: str, outputs: int) -> None:
    model = build(name, **options_for(name, SHAPES[name], outputs))
    assert model(torch.zeros(3, *SHAPES[name])).shape == (3, outputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_come_from_the_seed_alone(name: str) -> None:
    options = options_for(name, SHAPES[name], 1)
    torch.manual_seed(1)
    one = build(name, seed=5, **options).state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    two = build(name, seed=5, **options).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[k], two[k]) for k in one)
    other = build(name, seed=6, **options).state_dict()
    drawn = [k for k in one if one[k].unique().numel() > 1]  # batch normalization starts from constants
    assert drawn
    assert not any(torch.equal(one[k], other[k]) for k in drawn)


def test_the_papers_network_has_the_papers_sizes() -> None:
    shapes = [tuple(m.weight.shape) for m in build("papers-cnn") if hasattr(m, "weight")]
    assert shapes == [(12, 3, 5, 5), (32, 12, 5, 5), (240, 800), (192, 240), (1, 192)]
    richness = build("papers-cnn", widths=[6, 18, 120, 84], activation="relu")
    shapes = [tuple(m.weight.shape) for m in richness if hasattr(m, "weight")]
    assert shapes == [(6, 3, 5, 5), (18, 6, 5, 5), (120, 450), (84, 120), (1, 84)]
    assert sum(isinstance(m, nn.ReLU) for m in richness) == 4


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("smal-cnn", {}, "did you mean 'small-cnn'"), ("x", {}, "expected one of"), ("small-cnn", {"siz": 8}, "did you mean"),
        ("linear", {}, "needs the option 'inputs'"), ("mlp", {"inputs": 2, "widths": 8}, "list"),
        ("mlp", {"inputs": 2, "widths": [8, 0]}, r"widths\[1\]"), ("mlp", {"inputs": 2, "activation": "x"}, "activation"),
        ("papers-cnn", {"widths": [6, 18]}, "list of four"), ("papers-cnn", {"widths": [6, 18, 0, 1]}, r"widths\[2\]"),
        ("papers-cnn", {"activation": "x"}, "papers-cnn: expected activation"),
        ("small-cnn", {"size": 3}, "at least 4"), ("linear", {"inputs": True}, "inputs"), ("linear", {"inputs": 2, "seed": -1}, "seed"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(name: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        build(name, **options)


def test_data_that_does_not_fit_is_refused() -> None:
    for name, shape in (("papers-cnn", (1, 28, 28)), ("small-cnn", (2,)), ("small-cnn", (1, 8, 6))):
        with pytest.raises(InputError, match="choose 'mlp'"):
            options_for(name, shape, 1)
