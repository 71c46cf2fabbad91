"""An audit's numbers are those of the functions it calls, and of slow ones; what it cannot say it says."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from excite import ExciteError, InputError, ModelError, RunError, bounds, lipschitz
from excite.bounds import Descent
from excite.margin import SearchOptions, margins
from excite.probes import richness
from excite.report.audit import audit
from excite.runs import Run
from excite.train import make_model
from excite.train.evaluate import load_model, measure
from excite.train.from_config import train
from models import same_state, state_of

from .conftest import QUICK, config, promise


@pytest.fixture(scope="module")
def settled():
    """A two-layer network that gradient descent has settled with, all units excited and the classes apart; float64."""
    x = torch.tensor([[2.0, 0.5], [3.0, 0.6], [2.5, 0.8], [0.5, 2.0], [0.6, 3.0], [0.8, 2.4]], dtype=torch.float64)
    y = torch.tensor([1, 1, 1, 0, 0, 0])
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[0.8, 0.3], [0.3, 0.8]]))
        model[2].weight.copy_(torch.tensor([[0.5, -0.3]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4000):
        optimizer.zero_grad()
        F.mse_loss(model(x)[:, 0], y.double()).backward()
        optimizer.step()
    return model, x, y


@pytest.mark.slow
def test_the_numbers_are_those_of_the_functions(folder):
    found = audit(folder, margin_points=4)
    saved = load_model(folder)
    model, x, y = saved.model, saved.data.x_train, saved.data.y_train
    assert str(found.layers) == str(richness(model, x, units=True))
    for one in found.lipschitz:
        assert one.local["train"] == pytest.approx(lipschitz.local(model, x, one.norm).numpy(), rel=1e-12)
        assert one.guaranteed == lipschitz.bound(model, x[:2], one.norm).value
    rule = Descent(0.2, 0.9)
    by_hand = bounds.descent_stability(model, lambda m: F.mse_loss(m(x)[:, 0], y.float()), rule)
    assert promise(found, "Stability").bound.value == by_hand.value
    assert promise(found, "Stability").measured == pytest.approx(by_hand.terms["sharpness"], rel=1e-6)
    two = bounds.two_layer_lipschitz(model, x, y[:, None].double(), rule, loss="mean")
    assert str(promise(found, "Persistency of excitation, Theorem 1").bound) == str(two)
    deep = bounds.deep_lipschitz(model, x, y[:, None].double(), rule, loss="mean")
    assert str(promise(found, "Richness").bound) == str(deep)
    for norm in ("2", "inf"):
        direct = margins(model, *saved.points("train", 4), norm=norm, bounds=None)
        assert torch.equal(found.margins[norm]["train"].values, direct.values)
    assert found.accuracy["train"] == float(((model(x)[:, 0] > 0.5) == y).float().mean())


@pytest.mark.slow
def test_where_training_has_settled_the_bounds_hold_and_inform(settled):
    model, x, y = settled
    found = audit(model, (x, y), loss="squared", descent=0.1, **QUICK)
    assert {one.bound.name.split(" (")[0] for one in found.theorems} == {
        "Stability of gradient descent",
        "Persistency of excitation, Theorem 1",
        "Persistency of excitation, Corollary 1",
        "Richness of hidden activations, Theorem 1",
    }
    for one in found.theorems:
        assert one.bound.holds, str(one.bound)
        assert math.isfinite(one.bound.value)
        assert one.ratio >= 1
    layers = promise(found, "Richness").layers
    assert len(layers) == 2
    assert all(most >= norm > 0 for most, norm in layers)
    assert layers[0][1] == pytest.approx(float(torch.linalg.matrix_norm(model[0].weight.detach(), 2)))
    assert any("at most" in sentence and "measured" in sentence for sentence in found.sentences)


@pytest.mark.slow
def test_the_runs_margins_are_used_if_of_this_checkpoint(tmp_path):
    path = tmp_path / "run"
    train(config(checkpoint_every="1 step"), path).close()
    measure(load_model(path), norm="inf", options=SearchOptions(steps=5))
    stored = json.loads((path / "artifacts/margins-inf-train.json").read_text())
    changed = stored | {"values": [v + 100 for v in stored["values"]]}
    (path / "artifacts/margins-inf-train.json").write_text(json.dumps(changed))
    assert float(audit(path, units=False, margin_points=1).margins["inf"]["train"].median) > 90
    early = next(c.path for c in Run.open(path).checkpoints() if c.step < 3)
    assert float(audit(early, units=False, margin_points=1).margins["inf"]["train"].median) < 90
    (path / "artifacts/margins-inf-train.json").write_text("{broken")
    assert float(audit(path, units=False, margin_points=1).margins["inf"]["train"].median) < 90


def test_the_model_and_the_random_state_are_left_as_they_were():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(8, 2))
    x, y = torch.randn(20, 1, 4, 4), torch.arange(20) % 2
    model.train()
    before = state_of(model)
    audit(model, (x, y), loss="cross-entropy", descent=0.1, margin_points=1)
    assert same_state(before, state_of(model))


def test_a_regression_has_no_margins_but_everything_else(tmp_path):
    train(config(data={"name": "frequencies", "train": 12, "test": 5}, batch=12), tmp_path / "run").close()
    found = audit(tmp_path / "run")
    assert found.margins == {}
    assert "regression" in found.margins_why
    assert found.accuracy == {}
    assert promise(found, "Persistency of excitation, Theorem 1").measured > 0
    assert found.write(tmp_path / "page.html").exists()


def test_bad_input_is_refused_in_one_line(folder, tmp_path):
    x, y = torch.randn(6, 3), torch.arange(6) % 2
    model = make_model("mlp", seed=0, inputs=3, widths=[2])
    bad = make_model("mlp", seed=0, inputs=3, widths=[2])
    with torch.no_grad():
        bad[1].weight[0, 0] = math.nan
    (tmp_path / "foreign.safetensors").write_bytes(b"nothing")
    (tmp_path / "empty").mkdir()
    cases = [
        (RunError, "no run folder", lambda: audit(tmp_path / "nowhere")),
        (RunError, "not a run folder", lambda: audit(tmp_path / "empty")),
        (RunError, "not a safetensors file", lambda: audit(tmp_path / "foreign.safetensors")),
        (ModelError, "1.weight has NaN", lambda: audit(bad, (x, y))),
        (ModelError, "no affine layer", lambda: audit(nn.Flatten(), (x, y), **QUICK)),
        (InputError, "expected data with a model", lambda: audit(model)),
        (InputError, "Dataset or tensors", lambda: audit(model, {"x": x, "y": y})),
        (InputError, "a label for each point", lambda: audit(model, (x, y[:2]))),
        (InputError, "at least one", lambda: audit(model, (x[:0], y[:0]))),
        (InputError, "finite", lambda: audit(model, (x * math.nan, y))),
        (ModelError, "check that it takes inputs of this shape", lambda: audit(model, (x[:, :2], y))),
        (InputError, "a run has its own data", lambda: audit(folder, (x, y))),
        (InputError, "points: expected", lambda: audit(model, (x, y), points=0)),
        (InputError, "step size", lambda: audit(model, (x, y), descent=-1.0, loss="squared")),
    ]
    for kind, text, attempt in cases:
        with pytest.raises(kind, match=text) as caught:
            attempt()
        assert isinstance(caught.value, ExciteError)
        assert "\n" not in str(caught.value)


def test_training_and_test_points_as_tensors():
    model, x = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(20, 2)
    y = (x[:, 0] > 0).long()
    found = audit(model, train=(x[:12], y[:12]), test=(x[12:], y[12:]), units=False, **QUICK)
    assert dict(found.points) == {"train": (12, 12), "test": (8, 8)}
    assert found.accuracy.keys() == {"train", "test"}
    with pytest.raises(InputError, match="either data= or train="):
        audit(model, (x, y), train=(x, y))
    with pytest.raises(InputError, match="test: expected points of shape"):
        audit(model, train=(x, y), test=(x[:, :1], y))
