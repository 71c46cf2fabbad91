"""Which theorems speak about which models; what they are given."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from excite import InputError, bounds
from excite.report.audit import audit
from excite.report.audit.target import AuditTarget
from excite.report.audit.theorems import linear_rank
from excite.report.audit.training_setup import TrainingSetup, mean_loss
from excite.train.evaluate import load_model
from excite.train.from_config import train

QUICK = {"with_margins": False, "units": False}


def silent(found, word):
    return next(one.why for one in found.not_applicable if word in one.theorem)


def points(n=20, dimensions=2, seed=0):
    """Two classes apart along the first axis."""
    x = torch.randn(n, dimensions, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    y = torch.arange(n) % 2
    x[:, 0] = x[:, 0].abs() * (2 * y - 1) + 2 * y - 1
    return x, y


@pytest.mark.slow
def test_a_linear_classifier_with_two_logits_is_their_difference(tmp_path):
    settings = {
        "data": {"name": "linear-margins-2"}, "model": {"name": "linear"}, "loss": "cross-entropy", "epochs": 2000,
        "optimizer": {"name": "sgd", "lr": 0.02, "momentum": 0.9}, "batch": 40, "watch": False,
        "checkpoint_every": "1000 epochs",
    }  # fmt: skip
    train(settings, tmp_path / "run").close()
    found = audit(tmp_path / "run", **QUICK)
    by_name = {one.bound.name.split(",")[0]: one for one in found.theorems}
    assert {"Theorem 2", "Theorem 2 at any time", "Corollary 2"} <= by_name.keys()
    saved = load_model(tmp_path / "run")
    f = saved.model(saved.data.x_train).detach().double()
    weight = saved.model[1].weight.detach().double()
    s = 2 * saved.data.y_train - 1
    distance = float(((f[:, 1] - f[:, 0]) * s).min() / (weight[1] - weight[0]).norm())
    any_time = by_name["Theorem 2 at any time"]
    assert any_time.measured == pytest.approx(distance, rel=1e-4)
    # The steps are in the span of the points from the initial weights on.
    assert any_time.bound.holds, str(any_time.bound)
    assert any_time.ratio >= 1
    assert by_name["Theorem 2"].measured == pytest.approx(distance, rel=1e-4)
    assert by_name["Corollary 2"].ratio >= 1 - 1e-9
    assert "squared error" in silent(found, "Richness")


def test_without_initial_weights_the_span_is_measured_and_fails():
    x, y = points(6, dimensions=10)
    model = nn.Linear(10, 1).double()
    found = audit(model, (x, y), loss="squared", **QUICK)
    (one,) = found.theorems
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
    theirs, ours = (next(p for p in found.theorems if "Theorem 3" in p.bound.name) for found in (one, two))
    assert ours.bound.terms["at any time"] == pytest.approx(theirs.bound.terms["at any time"])
    assert ours.measured == pytest.approx(theirs.measured)
    model = two_layers([[1.0, -1.0]])
    f = model(x)[:, 0] * (2 * y - 1)
    slopes = [torch.autograd.functional.jacobian(lambda p: model(p)[0], p[None])[0, 0].norm() for p in x]
    assert theirs.measured == pytest.approx(float(max(slopes) / f.detach().min()))
    assert theirs.measured <= theirs.bound.terms["at any time"] * (1 + 1e-9)
    biased = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)).double()
    assert "bias" in silent(audit(biased, (x, y), loss="cross-entropy", **QUICK), "Theorem 3")


def test_decay_of_the_mean_is_the_mu_of_theorem_four():
    """N times the gradient of the mean loss with decay is the gradient that the theorem speaks about."""
    x, y = points()
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 1, bias=False)).double()
    setting = TrainingSetup("squared", bounds.Descent(0.1), "", decay=0.03)
    (one,) = linear_rank(AuditTarget(model, x, y, len(x), 2, setting, 0.5))
    slopes = torch.autograd.grad(mean_loss(model, x, y, 2, setting), list(model.parameters()))
    size = math.sqrt(sum(float(g.square().sum()) for g in slopes))
    assert one.bound.terms["gradient norm"] == pytest.approx(len(x) * size)
    assert one.measured == pytest.approx(
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
    (one,) = found.theorems
    assert one.measured == pytest.approx(float(torch.linalg.eigvalsh(hessian)[-1]), rel=1e-6)
    assert one.bound.value == (4.0 if one.measured <= 4 else None)


def full_hessian(model, x, error):
    """The Hessian of the mean over points of `error(outputs)` in all parameters, written out by autograd."""
    names = [name for name, _ in model.named_parameters()]
    parameters = tuple(p.detach() for p in model.parameters())

    def loss(*values):
        return error(torch.func.functional_call(model, dict(zip(names, values)), x)).mean()

    blocks = torch.autograd.functional.hessian(loss, parameters)
    return torch.cat([torch.cat([b.reshape(p.numel(), -1) for b in row], 1) for p, row in zip(parameters, blocks)])


@pytest.mark.parametrize("loss", ["squared", "mse"])
def test_real_outputs_are_summed_unless_the_loss_is_the_mean(loss):
    """‖f − y‖² has m times the curvature of `F.mse_loss`; every theorem sees the same sharpness over its limit."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 2, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3)).double()

    def error(f):
        return (f - y).square().sum(1) if loss == "squared" else F.mse_loss(f, y)

    top = float(torch.linalg.eigvalsh(full_hessian(model, x, error))[-1])
    found = audit(model, (x, y), loss=loss, descent=0.05, **QUICK)
    assert len(found.theorems) == 3  # stability, and the Theorems 1 of both papers
    assert found.theorems[0].measured == pytest.approx(top, rel=1e-6)
    for one in found.theorems:
        assert one.bound.terms["sharpness"] / one.bound.terms["limit"] == pytest.approx(top * 0.05 / 2, rel=1e-6)


def test_a_diverging_step_of_many_outputs_is_not_called_stable():
    """Linear outputs: the loss is a quadratic, and gradient descent with 1.5 times the largest step runs away."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 2, dtype=torch.float64), torch.randn(12, 3, dtype=torch.float64)
    model = nn.Linear(2, 3).double()
    top = float(torch.linalg.eigvalsh(full_hessian(model, x, lambda f: (f - y).square().sum(1)))[-1])
    for share, held in ((0.99, True), (1.5, False)):
        step = share * 2 / top
        found = audit(model, (x, y), loss="squared", descent=step, **QUICK)
        assert found.theorems[0].bound.assumptions[0].held is held
        run, sizes = nn.Linear(2, 3).double(), []
        run.load_state_dict(model.state_dict())
        for _ in range(60):
            slopes = torch.autograd.grad((run(x) - y).square().sum(1).mean(), list(run.parameters()))
            with torch.no_grad():
                for p, slope in zip(run.parameters(), slopes):
                    p -= step * slope
            sizes.append(float(sum(slope.square().sum() for slope in slopes)))
        assert (sizes[-1] < sizes[0]) is held


class Tokens(nn.Module):
    """Ids in; a decision per sequence or per token. `index` reads the table in a way that takes any integer."""

    def __init__(self, outputs, *, each=False, index=False):
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 4))
        self.hidden, self.head = nn.Linear(4, 5), nn.Linear(5, outputs)
        self.each, self.index = each, index

    def forward(self, x):
        h = self.table[x.long()] if self.index else F.embedding(x, self.table)
        return self.head(self.hidden(h if self.each else h.mean(1)).relu())


@pytest.mark.parametrize(
    ("model", "labels", "loss"),
    [
        (Tokens(3), "classes", "cross-entropy"),
        (Tokens(1), "classes", "squared"),
        (Tokens(3, index=True), "classes", "squared"),
        (Tokens(4), "targets", "mse"),
        (Tokens(7, each=True), "tokens", "cross-entropy"),
    ],
    ids=["embedding", "binary", "indexing", "regression", "language model"],
)
def test_token_ids_are_never_moved_and_the_rest_is_measured(model, labels, loss, tmp_path):
    torch.manual_seed(0)
    x = torch.randint(0, 7, (18, 5))
    count = model.head.out_features
    kinds = {"classes": torch.arange(18) % max(2, count), "targets": torch.randn(18, count), "tokens": x.roll(-1, 1)}
    y = kinds[labels]
    found = audit(model, (x, y), loss=loss, descent=0.1, margin_points=2)
    assert [layer.layer for layer in found.layers] == ["hidden", "head"]

    def error(f):
        if loss == "cross-entropy":
            return F.cross_entropy(f.flatten(0, -2), y.flatten(), reduction="none")
        if labels == "targets":
            return (f - y).square().sum(1) / count
        if count == 1:
            return (f[:, 0] - y).square()
        return (f - (torch.eye(count)[y] - 1 / count) / 2**0.5).square().sum(1)

    top = float(torch.linalg.eigvalsh(full_hessian(model, x, error))[-1])
    assert [one.bound.name for one in found.theorems] == ["Stability of gradient descent"]
    assert found.theorems[0].measured == pytest.approx(top, rel=1e-3)
    assert found.margins == {}
    said = [line for line in found.sentences if "were not measured" in line]
    assert [line.split(":")[0] for line in said] == [
        "Local Lipschitz constants were not measured",
        "Margins were not measured",
    ]
    assert all("\n" not in one.why for one in found.not_applicable)
    assert "not measured" in found.write(tmp_path / "page.html").read_text()
    assert found.to_dict()["lipschitz"]["2"]["local"] == {}


def test_nothing_is_assumed_of_a_loss_that_was_not_given():
    x, y = points()
    mlp = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    assert "the loss of the training" in silent(audit(mlp, (x, y), descent=0.1, **QUICK), "Stability")
    soft = audit(mlp, (x, y.double()), loss="cross-entropy", descent=0.1, **QUICK)
    assert "integer labels" in silent(soft, "Stability")
    wrong = audit(mlp, (x, x[:, :1]), loss="squared", descent=0.1, **QUICK)
    assert "expected shape (20, 2)" in silent(wrong, "Stability")
    assert "expected shape (20, 2)" in silent(wrong, "Richness")
    with pytest.raises(InputError, match="'squared', 'mse' or 'cross-entropy'"):
        audit(mlp, (x, y), loss="hinge", **QUICK)


@pytest.mark.slow
def test_the_reason_of_silence_is_said():
    x, y = points()
    mlp = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    found = audit(mlp, (x, y), **QUICK)
    assert found.theorems == ()
    assert "not known" in silent(found, "Stability")
    found = audit(mlp, (x, y), loss="squared", **QUICK)
    assert "step size" in silent(found, "Stability")
    assert "step size" in silent(found, "Richness")
    found = audit(mlp, (x, y), loss="squared", descent=0.1, points=7, **QUICK)
    assert "7 of 20" in silent(found, "Richness")
    assert "7 of 20 training points" in found.theorems[0].how
    deep = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)).double()
    found = audit(deep, (x, y), loss="squared", descent=0.1, **QUICK)
    assert "has 3" in silent(found, "Theorem 1 and Corollary 1")
    wide = nn.Sequential(nn.Linear(2, 1000), nn.ReLU(), nn.Linear(1000, 200), nn.ReLU(), nn.Linear(200, 1)).double()
    assert "too wide for an audit" in silent(audit(wide, (x, y), loss="squared", descent=0.1, **QUICK), "Richness")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"optimizer": {"name": "adam"}}, "adam scales"),
        ({"schedule": "one-cycle"}, "the step size changes"),
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
    assert [one.held for one in found.training_conditions] == [False, False, False, True]
    assert "4 of 8" in found.training_conditions[1].detail
    assert "excitation" in found.training_conditions[2].detail
