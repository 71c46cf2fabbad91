import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from excite import InputError
from excite.probes import Rank, effective_rank, richness
from excite.probes.base import StepContext
from models import CASES, build, same_state, state_of


def by_definition(rows):
    values = torch.linalg.svdvals(rows - rows.mean(0)).square()
    shares = [float(v) for v in values / values.sum() if v > 0]
    return math.exp(-sum(s * math.log(s) for s in shares))


@given(n=st.integers(3, 30), d=st.integers(1, 30), scale=st.sampled_from([1e-8, 1.0, 1e8]), seed=st.integers(0, 99))
def test_effective_rank_ignores_scale_shift_and_rotation(n, d, scale, seed):
    torch.manual_seed(seed)
    rows = torch.randn(n, d, dtype=torch.float64) * torch.rand(d, dtype=torch.float64)
    rank = effective_rank(rows)
    assert rank == pytest.approx(by_definition(rows), rel=1e-9)
    assert 1 - 1e-9 <= rank <= min(n - 1, d) + 1e-9
    rotation = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))[0]
    assert effective_rank(scale * (rows @ rotation + 3)) == pytest.approx(rank, rel=1e-6)


def test_effective_rank_at_its_ends():
    assert effective_rank(torch.full((5, 3), 0.1)) == 0
    assert effective_rank(torch.zeros(5, 3)) == 0
    line = torch.randn(50, 1, dtype=torch.float64) * torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    assert effective_rank(line) == pytest.approx(1)
    even = torch.cat([torch.eye(4), -torch.eye(4)]).double()
    assert effective_rank(even) == pytest.approx(4)
    for bad in (torch.zeros(3), torch.full((3, 3), math.nan)):
        with pytest.raises(InputError):
            effective_rank(bad)


@pytest.mark.parametrize("name", CASES)
def test_every_layer_of_every_model_has_a_rank(name):
    model, x = build(name, batch=6)
    model.train()
    before = state_of(model)
    values = Rank().measure(StepContext(model, 0, example=x))
    assert same_state(before, state_of(model))
    values = {key: value for key, value in values.items() if not key.startswith("statistics/")}
    assert len(values) == 5 * CASES[name].layers
    assert all(v >= 0 and math.isfinite(v) for v in values.values())
    assert all(v <= 1 + 1e-9 for k, v in values.items() if k.startswith(("share", "smallest")))
    for key in values:
        quantity, _, layer = key.partition("/")
        if quantity == "numerical":  # each kind of rank is at most the next
            assert values[f"participation/{layer}"] <= values[f"effective/{layer}"] * (1 + 1e-9)
            assert values[f"effective/{layer}"] <= values[key] * (1 + 1e-6)


def test_the_probe_agrees_with_the_function_on_data():
    model, x = build("convolutional", batch=40)
    values = Rank(units=True, max_rows=10**6).measure(StepContext(model, 0, example=x))
    found = richness(model, x, patches=None, units=True)
    for one in found:
        assert values[f"effective/{one.layer}"] == pytest.approx(float(one.covariance.effective_rank), rel=1e-9)
        assert values[f"participation/{one.layer}"] == pytest.approx(
            float(one.covariance.participation_ratio), rel=1e-9
        )
        assert values[f"numerical/{one.layer}"] == float(one.covariance.rank)
        assert values[f"deficient/{one.layer}"] == len(one.units.deficient) / len(one.units)


def test_at_most_so_many_rows():
    model, x = build("transformer", batch=6)
    few, many = (Rank(max_rows=n).measure(StepContext(model, 0, example=x)) for n in (5, 100))
    assert few["numerical/head"] <= 4
    assert many["numerical/encoder.layers.0.linear1"] > 4


def test_units_are_named_when_they_change_and_only_then():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1))
    x = torch.randn(60, 3)
    with torch.no_grad():
        model[0].bias.fill_(10.0)  # every point activates every unit
        model[0].bias[5] = -100.0  # but for one that is silent from the start: no news
    probe = Rank(units=True)

    def look():
        values = probe.measure(StepContext(model, 0, example=x))
        return values["deficient/0"], {k: v for k, v in values.items() if k.startswith("unit/0/")}

    assert look() == (1 / 6, {})
    with torch.no_grad():
        model[0].bias[1] = model[0].bias[4] = -100.0
    assert look() == (3 / 6, {"unit/0/1": 1.0, "unit/0/4": 1.0})
    assert look() == (3 / 6, {})
    again = Rank(units=True)
    again.load_state_dict(probe.state_dict())
    probe = again
    with torch.no_grad():
        model[0].bias[4] = 10.0
    assert look() == (2 / 6, {"unit/0/4": 0.0})
    assert set(richness(model, x, units=True)["0"].units.deficient) == {1, 5}


def test_of_a_wide_layer_a_few_units_are_named():
    model = nn.Sequential(nn.Linear(2, 200), nn.ReLU(), nn.Linear(200, 1))
    x, probe = torch.randn(30, 2), Rank(units=True)
    with torch.no_grad():
        model[0].bias.fill_(10.0)
    probe.measure(StepContext(model, 0, example=x))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
    values = probe.measure(StepContext(model, 1, example=x))
    assert values["deficient/0"] == 1
    assert sum(key.startswith("unit/0/") for key in values) == 64
