"""Training and data of `boundaries` against PyTorch's own, and its whole path in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from excite.studies.excitation.boundaries import ENTROPY, SCALES, SQUARED, STUDY, compute, points_and_weights, train
from studies.small import run_tiny

SETTINGS: dict[str, Any] = {"steps": 40, "lr": 1e-2, "momentum": 0.9, "hidden": 20, "bias": 10.0, "divide": 5.0}


def test_data_and_weights_are_drawn_as_the_authors_draw_them() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(21)
        middle = 0.5 * torch.randn(8, 2) + torch.tensor([7.0, 19.0])
        outer = [0.5 * torch.randn(4, 2) + torch.tensor(centre) for centre in ([0.0, 5.0], [11.0, 27.0])]
        hidden, output = torch.nn.Linear(2, 20), torch.nn.Linear(20, 1)
    x, y, network = points_and_weights(21, SETTINGS)
    np.testing.assert_array_equal(x, torch.cat([middle, *outer]).double().numpy())
    assert y.tolist() == [0.0] * 8 + [1.0] * 8
    np.testing.assert_array_equal(network.hidden, hidden.weight.detach().double().numpy())
    np.testing.assert_allclose(network.hidden_bias, 10 * hidden.bias.detach().double().numpy())
    np.testing.assert_array_equal(network.output, output.weight.detach().double().numpy()[0])
    assert network.output_bias == output.bias.item()


@pytest.mark.parametrize("loss", [ENTROPY, SQUARED])
def test_training_is_that_of_pytorch(loss: str) -> None:
    x, y, first = points_and_weights(1, SETTINGS)
    network = train(first, x, y, {**SETTINGS, "loss": loss}, lambda share: None)
    model = torch.nn.Sequential(torch.nn.Linear(2, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1)).double()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), first):
            parameter.copy_(torch.as_tensor(value).reshape(parameter.shape))
    velocity = [torch.zeros_like(parameter) for parameter in model.parameters()]
    points, labels = torch.as_tensor(x), torch.as_tensor(y)
    for _ in range(SETTINGS["steps"]):
        f = model(points).squeeze() / 5
        squared = torch.nn.functional.mse_loss(f, labels - 0.5)
        entropy = torch.nn.functional.binary_cross_entropy_with_logits(f, labels)
        gradients = torch.autograd.grad(entropy if loss == ENTROPY else squared, list(model.parameters()))
        with torch.no_grad():
            for parameter, v, gradient in zip(model.parameters(), velocity, gradients):
                v.mul_(0.9).add_(gradient)
                parameter.sub_(1e-2 * v)
    for parameter, value in zip(model.parameters(), network):
        np.testing.assert_allclose(parameter.detach().numpy().reshape(value.shape), value, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(model(points).detach().numpy()[:, 0], network(x), rtol=1e-9)


def test_variants_share_data_and_first_weights() -> None:
    variants = {variant.name: variant.config for variant in STUDY.variants(SCALES["paper"])}
    x, _, first = points_and_weights(1, variants[ENTROPY])
    same, _, also = points_and_weights(1, variants[SQUARED])
    other, _, weights = points_and_weights(1, variants["squared error, other first weights"])
    centred = points_and_weights(1, variants["cross-entropy, centred data"])[0]
    assert (x == same).all()
    assert all((a == b).all() for a, b in zip(first, also))
    assert (x == other).all()
    assert not (first.hidden == weights.hidden).any()
    np.testing.assert_allclose(centred, x - x.mean(0))


def test_untrained_networks_are_not_to_be_trusted() -> None:
    found = compute({**SETTINGS, "steps": 0, "loss": ENTROPY}, 0, lambda share: None)
    assert found.values["margin"] == 0
    assert found.flags


@pytest.mark.slow
def test_the_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_tiny("boundaries", replace(SCALES["quick"], steps=300, seeds=2), tmp_path, monkeypatch)
    for found in result.numbers:
        assert 0 <= found.margin <= found.best
    assert (tmp_path / "pages/images/boundaries-centred.png").exists()
