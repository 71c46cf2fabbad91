import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import excite
from excite import InputError
from excite.monitor.alerts import Alerts, Fell
from excite.probes import Every, Loss, Rank, effective_rank, richness
from excite.probes.activation_rank.rank import _ranks
from excite.probes.base import StepContext
from excite.report.history import MetricHistory
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
    values = {key: value for key, value in values.items() if not key.startswith(("statistics/", "answers"))}
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


class Sequences(nn.Module):
    """One block of attention; with `classes`, one answer for each sequence, else one for each token."""

    def __init__(self, classes: int | None) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(24, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.head, self.classes = nn.Linear(16, 32), nn.Linear(32, classes or 24), classes

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.up(x.mean(1) if self.classes else x).relu())


def test_answers_for_each_sequence_are_counted():
    ids = torch.arange(24).view(4, 6)
    assert Rank().measure(StepContext(Sequences(4), 0, example=ids))["answers"] == 4
    assert Rank().measure(StepContext(Sequences(1), 0, example=ids))["answers"] == 2
    assert "answers" not in Rank().measure(StepContext(Sequences(None), 0, example=ids))
    assert "answers" not in Rank().measure(StepContext(nn.Linear(3, 4), 0, example=torch.randn(5, 3)))


@pytest.mark.slow
def test_a_collapse_onto_four_classes_is_no_damage(tmp_path):
    torch.manual_seed(0)
    model, optimizer = (net := Sequences(4)), torch.optim.AdamW(net.parameters(), 5e-3)
    y = torch.arange(64) % 4
    ids = 6 * y[:, None] + torch.randint(6, (64, 6))
    probes = [Loss(), Rank(Every(10))]
    with excite.watch(model, ids, tmp_path / "run", optimizer, probes=probes, alerts=[Fell(fraction=0.5)]) as watch:
        for _ in range(200):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids), y)
            loss.backward()
            optimizer.step()
            watch.step(loss)
    run = excite.load_run(tmp_path / "run")
    steps, ranks = run.series("rank/effective/head")
    without = Alerts([Fell(fraction=0.5)])
    assert any(without.update(step, {"rank/effective/head": rank}) for step, rank in zip(steps, ranks))
    assert not [name for name in run.names() if name.startswith("alert/")]
    (found,) = _ranks(MetricHistory(run.names(), run.series))
    assert (found.kind, "4 classes need 3 directions" in found.text) == ("note", True)
    (found,) = _ranks(MetricHistory([name for name in run.names() if name != "rank/answers"], run.series))
    assert found.kind == "warning"
