"""An audit's numbers are those of the functions it calls, and of slow ones; what it cannot say it says."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from excite import ExciteError, InputError, ModelError, RunError, bounds, lipschitz
from excite.bounds import Descent
from excite.margin import SearchOptions, margins
from excite.probes import richness
from excite.report.audit import audit
from excite.report.audit.narrative import unit_counts
from excite.report.audit.training_setup import mean_loss, training_setup
from excite.runs import Run
from excite.train import make_model
from excite.train.config import parse_config
from excite.train.evaluate import load_model, measure
from excite.train.from_config import build_model, train
from models import same_state, state_of

MANY = {"name": "digits", "classes": [1, 2, 3], "train": 16, "test": 9}
QUICK = {"with_margins": False}


def config(**changes):
    settings = {
        "data": {"name": "moons", "train": 16, "test": 10},
        "model": {"name": "mlp", "options": {"widths": [4]}},
        "optimizer": {"name": "sgd", "lr": 0.2, "momentum": 0.9},
        "epochs": 3,
        "batch": 16,
        "watch": False,
        "checkpoint_every": "1000 steps",
    }
    return settings | changes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "first"
    train(config(), path).close()
    return path


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


def promise(found, name):
    return next(one for one in found.theorems if one.bound.name.startswith(name))


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


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": "cross-entropy"},
        {"data": MANY},
        {"data": MANY, "loss": "cross-entropy"},
        {"data": {"name": "frequencies", "train": 16, "test": 5}},
    ],
    ids=["binary", "cross-entropy", "codes", "many classes, cross-entropy", "regression"],
)
def test_the_loss_and_the_start_are_those_of_the_training(changes, tmp_path):
    """The first step of a real training goes down the gradient of `mean_loss` from the model that `start` makes."""
    settings = parse_config(config(**changes, epochs=1, optimizer={"name": "sgd", "lr": 0.3, "weight_decay": 0.01}))
    train(settings, tmp_path / "run").close()
    saved = load_model(tmp_path / "run")
    begun = build_model(settings, saved.data)
    loss = mean_loss(
        begun, saved.data.x_train, saved.data.y_train, len(saved.data.classes), training_setup(settings, 16)
    )
    for start, slope, end in zip(
        begun.parameters(), torch.autograd.grad(loss, begun.parameters()), saved.model.parameters()
    ):
        assert torch.allclose(start - 0.3 * slope, end, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("classes", [2, 3])
def test_sharpness_over_limit_is_the_same_in_the_units_of_the_training_and_of_the_theorems(classes, tmp_path):
    data = {"name": "digits", "classes": list(range(classes)), "train": 12, "test": 6}
    train(config(data=data, epochs=5, batch=12), tmp_path / "run").close()
    found = audit(tmp_path / "run", units=False, **QUICK)
    ratios = [p.bound.terms["sharpness"] / p.bound.terms["limit"] for p in found.theorems]
    assert len(ratios) >= 2
    assert ratios == pytest.approx([ratios[0]] * len(ratios), rel=1e-3)


@pytest.mark.slow
def test_where_training_has_settled_the_bounds_hold_and_say_something(settled):
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


def test_a_failed_condition_leaves_no_number(folder):
    found = audit(folder, **QUICK)
    theorem = promise(found, "Persistency of excitation, Theorem 1")
    assert theorem.bound.value is None
    assert theorem.ratio is None
    assert any(sentence.startswith("No bound from") and "converged" in sentence for sentence in found.sentences)
    assert "failed: training has converged" in str(found)


def test_units_are_counted_by_what_they_lack():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    x = torch.randn(12, 3, dtype=torch.float64)
    x[:, 2] = x[:, 0] + x[:, 1]  # a direction that no point uses
    x[:4] = torch.randn(4, 3)
    with torch.no_grad():
        model[0].weight[0], model[0].bias[0] = 0.0, -1.0  # never active
        model[0].weight[1], model[0].bias[1] = 0.0, 1.0  # always
    units = richness(model, x, units=True)["0"].units
    ranks = []
    for k in range(4):
        rows = x[(x @ model[0].weight[k] + model[0].bias[k]) > 0].numpy()
        ranks.append((len(rows), np.linalg.matrix_rank(rows) if len(rows) else 0))
    by_hand = {
        "excited": sum(r == 3 for _, r in ranks),
        "never active": sum(n == 0 for n, _ in ranks),
        "too few points": sum(0 < n < 3 for n, _ in ranks),
        "too few directions": sum(n >= 3 and r < 3 for n, r in ranks),
    }
    assert unit_counts(units) == by_hand
    assert by_hand["never active"] == 1


@pytest.mark.slow
def test_the_run_s_own_margins_are_taken_if_they_are_of_this_checkpoint(tmp_path):
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


def test_what_it_returns_can_be_stored(folder, tmp_path):
    found = audit(folder, margin_points=1)
    again = json.loads(json.dumps(found.to_dict()))
    assert again["layers"][0]["effective_rank"] == float(found.layers["1"].covariance.effective_rank)
    assert again["bounds"][0]["value"] == found.theorems[0].bound.value
    found.keep(folder)
    assert Run.open(folder).read_json("audit") == again


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
        (RunError, "not a run folder", lambda: audit(tmp_path / "foreign.safetensors")),
        (ModelError, "1.weight has NaN", lambda: audit(bad, (x, y))),
        (ModelError, "no affine layer", lambda: audit(nn.Flatten(), (x, y), **QUICK)),
        (InputError, "expected data with a model", lambda: audit(model)),
        (InputError, "Dataset or tensors", lambda: audit(model, {"x": x, "y": y})),
        (InputError, "a label for each point", lambda: audit(model, (x, y[:2]))),
        (InputError, "at least one", lambda: audit(model, (x[:0], y[:0]))),
        (InputError, "finite", lambda: audit(model, (x * math.nan, y))),
        (ModelError, "does not run on points of shape", lambda: audit(model, (x[:, :2], y))),
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


def test_earlier_names_of_an_audit_still_work(folder):
    found = audit(folder, units=False, **QUICK)
    for old, new in {"promises": "theorems", "silent": "not_applicable", "steepness": "lipschitz"}.items():
        with pytest.warns(DeprecationWarning, match=new):
            assert getattr(found, old) is getattr(found, new)
