import math

import numpy as np
import pytest
import torch
from torch import nn

from excite import InputError, ModelError
from excite.probes import richness
from models import CASES, build, papers_network, same_state, state_of


def explicit(rows):
    rows = rows.double().numpy()
    centred = rows - rows.mean(0)
    return [np.linalg.eigvalsh(m.T @ m / len(rows))[::-1] for m in (centred, rows)]


def test_every_layer_against_explicit_matrices():
    model, x = build("convolutional", batch=50)
    found = richness(model, x, patches=None, batch=13)
    with torch.no_grad():
        inputs = {"0": x, "3": model[:3](x), "7": model[:7](x), "9": model[:9](x)}
    for name, signal in inputs.items():
        rows = signal
        if signal.dim() == 4:
            rows = nn.functional.unfold(signal, 3, padding=1).transpose(1, 2).reshape(-1, signal.shape[1] * 9)
        covariance, second = explicit(rows)
        one = found[name]
        assert one.points == len(rows)
        assert one.width == rows.shape[1]
        assert one.sampling is None
        assert np.allclose(one.covariance.values, covariance, rtol=1e-9, atol=1e-13 * covariance[0])
        assert np.allclose(one.second.values, second, rtol=1e-9, atol=1e-13 * second[0])
        shares = covariance[covariance > 0] / covariance.sum()
        assert float(one.covariance.effective_rank) == pytest.approx(math.exp(-(shares * np.log(shares)).sum()))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_model_in_any_batches_and_left_as_it_was(name):
    model, x = build(name, batch=12)
    model.train()
    before = state_of(model)
    units = name != "papers"  # 240 matrices of 800 × 800
    whole = richness(model, x, units=units, batch=12)
    assert same_state(before, state_of(model))
    assert len(whole) == CASES[name].layers
    for batch in (1, 5):
        for one, other in zip(whole, richness(model, x, units=units, batch=batch)):
            little = 1e-12 * (1 + one.covariance.total)
            assert np.allclose(one.covariance.values, other.covariance.values, atol=little)
            if one.units is not None:
                assert one.units.points.tolist() == other.units.points.tolist()
    assert all(0 <= r["effective_share"].high <= 1 + 1e-9 for r in whole.rows())
    assert str(whole).count("\n") >= len(whole)


def test_the_model_is_left_as_it_was_after_an_exception():
    model, x = build("batchnorm")
    model.train()
    before = state_of(model)
    for data in (torch.full_like(x, math.nan), x[:, :3], x[:0], iter([])):
        with pytest.raises(InputError):
            richness(model, data)
    assert same_state(before, state_of(model))


def test_sampled_patches_come_with_their_error():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 196, 1)).double()
    x = torch.randn(60, 2, 16, 16, dtype=torch.float64).cumsum(-1)
    every = richness(model, x, patches=None)["0"]
    errors, stated = [], []
    for seed in range(40):
        some = richness(model, x, patches=6, seed=seed)["0"]
        assert (some.sampling.rows, some.sampling.of) == (360, 60 * 196)
        errors.append(((some.covariance.values - every.covariance.values) ** 2).mean())
        stated.append((some.sampling.error * some.covariance.values[0]) ** 2)
    assert 0.2 < (np.mean(errors) / np.mean(stated)) ** 0.5 < 1.1
    assert "360 of 11760 patches" in str(richness(model, x, patches=6))


def test_a_wide_layer_is_sketched_and_says_so():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(120, 5), nn.ReLU(), nn.Linear(5, 1)).double()
    x = torch.randn(900, 120, dtype=torch.float64) * torch.logspace(0, -3, 120, dtype=torch.float64)
    exact, rough = richness(model, x), richness(model, x, exact=64, sketch=60)
    assert not rough["0"].exact
    assert rough["2"].exact
    assert "from a sketch" in str(rough)
    for quantity in ("effective_rank", "participation_ratio"):
        truth, between = (getattr(one["0"].covariance, quantity) for one in (exact, rough))
        assert between.low <= float(truth) <= between.high < 1.2 * between.low


def test_whole_images_and_figure_1():
    """The inputs of the papers' layers as the next layer sees them, and the variance explained by k components."""
    torch.manual_seed(0)
    model = papers_network()
    x = torch.rand(40, 3, 32, 32)
    found = richness(model, x, patches="whole", exact=500)
    assert [one.width for one in found] == [3072, 12 * 14 * 14, 800, 240, 192]
    with torch.no_grad():
        covariance, _ = explicit(model[:9](x))
    for k in (1, 5, 39, 80):
        assert float(found["9"].covariance.explained(k)) == pytest.approx(covariance[:k].sum() / covariance.sum())
    for one in found:  # 40 points: no more than 39 directions
        assert float(one.covariance.explained(39)) == pytest.approx(1)
        assert float(one.covariance.rank) <= 39
        assert f"{one.layer}: only 40 rows" in str(found)


BAD = {
    "no points": (lambda m, x: richness(m, x[:0]), "at least one"),
    "an empty loader": (lambda m, x: richness(m, []), "empty dataset"),
    "NaN": (lambda m, x: richness(m, torch.full_like(x, math.nan)), "finite"),
    "the wrong shape": (lambda m, x: richness(m, x[:, :3]), "does not run on inputs of shape"),
    "no tensor": (lambda m, x: richness(m, 3), "expected a tensor"),
    "points of different number": (lambda m, x: richness(m, (x, x[:2])), "same number of points"),
    "patches": (lambda m, x: richness(m, x, patches=0), "patches"),
    "exact": (lambda m, x: richness(m, x, exact=0), "exact"),
    "batch": (lambda m, x: richness(m, x, batch=0.5), "batch"),
    "tolerance": (lambda m, x: richness(m, x, tolerance=-1), "tolerance"),
    "a layer that is not there": (lambda m, x: richness(m, x, units=["nine"]), "no layer 'nine'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    model, x = build("mlp")
    call, message = BAD[name]
    with pytest.raises(InputError, match=message):
        call(model, x)


def test_models_without_anything_to_see():
    with pytest.raises(ModelError, match="no affine layer"):
        richness(nn.ReLU(), torch.randn(3, 2))
    with pytest.raises(InputError, match=r"expected a torch.nn.Module"):
        richness(lambda x: x, torch.randn(3, 2))


class Blows(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(x / 0)


def test_infinite_activations_name_their_layer():
    with pytest.raises(InputError, match="layer 'inner': expected finite"):
        richness(Blows(), torch.randn(3, 2))
