"""Which theorems speak about which models; what they are given."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from excite import ModelError, bounds
from excite.auditing import audit
from excite.auditing.chains import linear_chain
from excite.auditing.setting import Setting, mean_loss
from excite.auditing.subject import Subject
from excite.auditing.theorems import linear_rank
from excite.measuring import load_model
from excite.training import train

QUICK = {"with_margins": False, "units": False}


def silent(found, word):
    return next(one.why for one in found.silent if word in one.theorem)


def points(n=20, dimensions=2, seed=0):
    """Two classes apart along the first axis."""
    x = torch.randn(n, dimensions, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    y = torch.arange(n) % 2
    x[:, 0] = x[:, 0].abs() * (2 * y - 1) + 2 * y - 1
    return x, y


def test_a_linear_chain_is_its_weights():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 2, bias=False)).double()
    x = torch.randn(5, 2, 2, dtype=torch.float64)
    (a, b), (c, none) = linear_chain(model, x)
    assert none is None
    assert torch.allclose((x.flatten(1) @ a.T + b) @ c.T, model(x))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)),
        nn.Sequential(nn.Linear(2, 1), nn.Sigmoid()),
        nn.Sequential(nn.Conv1d(1, 1, 1), nn.Flatten()),
        nn.Sequential(nn.Hardtanh(), nn.Linear(2, 1)),
    ],
)
def test_what_is_no_linear_chain_is_refused_also_where_the_points_do_not_show_it(model):
    model = model.double()
    x = torch.full((4, 2), 0.1, dtype=torch.float64)
    if isinstance(model[0], nn.Linear) and len(model) == 3:
        nn.init.constant_(model[0].bias, 10.0)  # the ReLU does nothing near x
    if isinstance(model[0], nn.Conv1d):
        x = x[:, None]
    with pytest.raises(ModelError, match="linear layer"):
        linear_chain(model, x)


@pytest.mark.slow
def test_a_linear_classifier_with_two_logits_is_their_difference(tmp_path):
    settings = {
        "data": {"name": "linear-margins-2"}, "model": {"name": "linear"}, "loss": "cross-entropy", "epochs": 2000,
        "optimizer": {"name": "sgd", "lr": 0.02, "momentum": 0.9}, "batch": 40, "watch": False,
        "checkpoint_every": "1000 epochs",
    }  # fmt: skip
    train(settings, tmp_path / "run").close()
    found = audit(tmp_path / "run", **QUICK)
    by_name = {one.bound.name.split(",")[0]: one for one in found.promises}
    assert {"Theorem 2", "Theorem 2 at any time", "Corollary 2"} <= by_name.keys()
    saved = load_model(tmp_path / "run")
    f = saved.model(saved.data.x_train).detach().double()
    weight = saved.model[1].weight.detach().double()
    s = 2 * saved.data.y_train - 1
    distance = float(((f[:, 1] - f[:, 0]) * s).min() / (weight[1] - weight[0]).norm())
    any_time = by_name["Theorem 2 at any time"]
    assert any_time.truth == pytest.approx(distance, rel=1e-4)
    # The steps are in the span of the points from the initial weights on.
    assert any_time.bound.holds, str(any_time.bound)
    assert any_time.ratio >= 1
    assert by_name["Theorem 2"].truth == pytest.approx(distance, rel=1e-4)
    assert by_name["Corollary 2"].ratio >= 1 - 1e-9
    assert "squared error" in silent(found, "Richness")


def test_without_the_initial_weights_the_span_is_measured_and_fails():
    x, y = points(6, dimensions=10)
    model = nn.Linear(10, 1).double()
    found = audit(model, (x, y), loss="squared", **QUICK)
    (one,) = found.promises
    assert one.bound.value is None
    assert one.bound.failed


def two_layers(w):
    model = nn.Sequential(nn.Linear(2, len(w[0])), nn.ReLU(), nn.Linear(len(w[0]), len(w), bias=False)).double()
    torch.manual_seed(1)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.1], [-1.0, 0.2]]))
        model[0].bias.copy_(torch.tensor([0.1, 0.05]))
        model[2].weight.copy_(torch.tensor(w))
    return model


def test_two_logits_and_one_are_the_same_two_layer_network():
    x, y = points()
    root = math.sqrt(0.5)
    one = audit(two_layers([[1.0, -1.0]]), (x, y), loss="cross-entropy", threshold=0.0, **QUICK)
    two = audit(two_layers([[-root, root], [root, -root]]), (x, y), loss="cross-entropy", **QUICK)
    theirs, ours = (next(p for p in found.promises if "Theorem 3" in p.bound.name) for found in (one, two))
    assert ours.bound.terms["at any time"] == pytest.approx(theirs.bound.terms["at any time"])
    assert ours.truth == pytest.approx(theirs.truth)
    model = two_layers([[1.0, -1.0]])
    f = model(x)[:, 0] * (2 * y - 1)
    slopes = [torch.autograd.functional.jacobian(lambda p: model(p)[0], p[None])[0, 0].norm() for p in x]
    assert theirs.truth == pytest.approx(float(max(slopes) / f.detach().min()))
    assert theirs.truth <= theirs.bound.terms["at any time"] * (1 + 1e-9)
    biased = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    assert "bias" in silent(audit(biased, (x, y), loss="cross-entropy", **QUICK), "Theorem 3")


def test_decay_of_the_mean_is_the_mu_of_theorem_four():
    """N times the gradient of the mean loss with decay is the gradient that the theorem speaks about."""
    x, y = points()
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 1, bias=False)).double()
    setting = Setting("squared", bounds.Descent(0.1), "", decay=0.03)
    (one,) = linear_rank(Subject(model, x, y, len(x), 2, setting, 0.5))
    slopes = torch.autograd.grad(mean_loss(model, x, y, 2, setting), list(model.parameters()))
    size = math.sqrt(sum(float(g.square().sum()) for g in slopes))
    assert one.bound.terms["gradient norm"] == pytest.approx(len(x) * size)
    assert one.truth == pytest.approx(
        max(float(torch.linalg.svdvals(layer.weight.detach())[1:].sum()) for layer in model)
    )


def test_stability_is_the_full_hessian():
    x, y = points(8)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    found = audit(model, (x, y), loss="squared", descent=0.5, **QUICK)
    names = [name for name, _ in model.named_parameters()]

    def loss(*parameters):
        return F.mse_loss(torch.func.functional_call(model, dict(zip(names, parameters)), x)[:, 0], y.double())

    parameters = tuple(p.detach() for p in model.parameters())
    blocks = torch.autograd.functional.hessian(loss, parameters)
    hessian = torch.cat([torch.cat([b.reshape(p.numel(), -1) for b in row], 1) for p, row in zip(parameters, blocks)])
    (one,) = found.promises
    assert one.truth == pytest.approx(float(torch.linalg.eigvalsh(hessian)[-1]), rel=1e-6)
    assert one.bound.value == (4.0 if one.truth <= 4 else None)


def test_the_reason_of_silence_is_said():
    x, y = points()
    mlp = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    found = audit(mlp, (x, y), **QUICK)
    assert found.promises == ()
    assert "not known" in silent(found, "Stability")
    found = audit(mlp, (x, y), loss="squared", **QUICK)
    assert "step size" in silent(found, "Stability")
    assert "step size" in silent(found, "Richness")
    found = audit(mlp, (x, y), loss="squared", descent=0.1, points=7, **QUICK)
    assert "7 of 20" in silent(found, "Richness")
    assert "7 of 20 training points" in found.promises[0].how
    deep = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    found = audit(deep, (x, y), loss="squared", descent=0.1, **QUICK)
    assert "has 3" in silent(found, "Theorem 1 and Corollary 1")
    wide = nn.Sequential(nn.Linear(2, 1000), nn.ReLU(), nn.Linear(1000, 200), nn.ReLU(), nn.Linear(200, 1)).double()
    assert "takes long" in silent(audit(wide, (x, y), loss="squared", descent=0.1, **QUICK), "Richness")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"optimizer": {"name": "adam"}}, "adam scales"),
        ({"schedule": "one-cycle"}, "the step size moves"),
        ({"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "dampening": -0.5}}, "dampening"),
    ],
)
def test_optimizers_without_one_step_size(changes, why, tmp_path):
    settings = {
        "data": {"name": "moons", "train": 8, "test": 0}, "model": {"name": "mlp", "options": {"widths": [2]}},
        "optimizer": {"name": "sgd", "lr": 0.1}, "epochs": 1, "batch": 4, "watch": False,
        "excitation": {"radius": 0.01},
    } | changes  # fmt: skip
    train(settings, tmp_path / "run").close()
    found = audit(tmp_path / "run", **QUICK)
    assert why in silent(found, "Stability")
    assert why in silent(found, "Richness")
    assert [one.held for one in found.asked] == [False, False, False, True]
    assert "4 of 8" in found.asked[1].detail
    assert "excitation" in found.asked[2].detail
