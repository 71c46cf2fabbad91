"""The weights of several networks side by side compute what the networks compute."""

from __future__ import annotations

import pytest
import torch

from excite.errors import ModelError
from excite.train.vectorized.perceptrons import Perceptrons
from train.vectorized.ensemble_networks import mlp


@pytest.mark.parametrize("frozen", [False, True])
def test_outputs_are_those_of_the_models(frozen: bool) -> None:
    models = [mlp((3, 5, 4, 1), seed=seed) for seed in range(3)]
    if frozen:
        for model in models:
            model[0].weight.requires_grad_(False)
    networks = Perceptrons(models)
    x = torch.randn(7, 3, dtype=networks.form.dtype, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        outputs = networks.outputs(networks.prepare(x[None]))
        expected = torch.stack([model(x)[:, 0] for model in models])
    torch.testing.assert_close(outputs, expected)


def test_weights_are_written_back() -> None:
    models = [mlp((2, 3, 1), seed=seed) for seed in range(2)]
    networks = Perceptrons(models)
    networks.flat.add_(1.0)
    before = [p.detach().clone() for model in models for p in model.parameters()]
    networks.write_back()
    after = [p.detach() for model in models for p in model.parameters()]
    for old, new in zip(before, after):
        torch.testing.assert_close(new, old + 1)


def test_networks_of_two_forms_are_refused() -> None:
    with pytest.raises(ModelError, match="of one form"):
        Perceptrons([mlp((2, 3, 1)), mlp((2, 4, 1))])
