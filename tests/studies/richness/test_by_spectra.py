"""Signals of hidden layers and their spectra."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from excite.probes import richness
from excite.studies.richness.by_spectra import LAYERS, SEEN, signals, spectra
from excite.studies.richness.hidden_rank import NETWORK
from excite.train import build
from models import same_state, state_of

WIDTHS = {"conv1": 4704, "conv2": 1800, "pooled1": 1176, "pooled2": 450, "linear1": 120, "linear2": 84}


def test_signals_have_the_widths_of_the_paper() -> None:
    """Figure 1 prints 4704, 1800, 120, 84: convolutions before pooling. What layers see is 1176, 450, 120, 84."""
    for dropout in (0.0, 0.5):
        model = build("papers-cnn", dropout=dropout, **NETWORK)
        found = signals(model, torch.randn(3, 3, 32, 32))
        assert {name: signal.shape[1] for name, signal in found.items()} == WIDTHS
        assert found.keys() == LAYERS.keys()


@pytest.mark.parametrize("points", [40, 130])  # fewer than every layer has units, and more than some
def test_spectra_are_those_of_the_singular_values(points: int) -> None:
    model, x = build("papers-cnn", seed=1, dropout=0.5, **NETWORK).double(), torch.randn(points, 3, 32, 32).double()
    before = state_of(model)
    found = spectra(model, x, batch=27)
    assert same_state(before, state_of(model))
    model.eval()
    for name, signal in signals(model, x).items():
        rows = signal.detach().numpy()
        values = np.linalg.svd(rows - rows.mean(0), compute_uv=False) ** 2
        shares = values / values.sum()
        assert found[name]["explained"][:30] == pytest.approx(np.cumsum(shares)[:30], abs=1e-9)
        some = shares[shares > 1e-14]
        assert found[name]["effective"] == pytest.approx(np.exp(-(some * np.log(some)).sum()), rel=1e-7)
        assert found[name]["components99"] == int((np.cumsum(shares) < 0.99).sum()) + 1
        assert (found[name]["width"], found[name]["points"]) == (WIDTHS[name], points)


def test_inputs_of_layers_are_those_of_richness() -> None:
    model, x = build("papers-cnn", seed=1, **NETWORK), torch.randn(60, 3, 32, 32)
    found = spectra(model, x)
    known = richness(model, x, patches="whole", exact=4000)
    for name, layer in zip(SEEN, known.layers[1:], strict=True):
        assert found[name]["effective"] == pytest.approx(float(layer.covariance.effective_rank), rel=1e-5)


def test_a_signal_that_never_varies_has_no_rank() -> None:
    model = build("papers-cnn", **NETWORK)
    with torch.no_grad():
        model[9].weight.zero_()
    found = spectra(model, torch.randn(20, 3, 32, 32))["linear2"]
    assert (found["effective"], found["rank"], found["explained"][0]) == (0.0, 0.0, 0.0)
