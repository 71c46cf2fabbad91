"""Collapsed trainings are told, with a radius that holds; others are not."""

import math
import warnings

import pytest
import torch
from torch import nn

from excite import AdversarialTraining, InputError, ModelError, PersistentExcitation
from excite._core.background import DeferredChecks
from excite.excitation.collapse import WINDOW, CollapseCheck, holding_fraction, move_ratio
from excite.train.config import parse_config
from excite.train.from_config import train


def advice(ratio):
    return f"ratio {ratio:g}"


def observed(losses, action="warn", trivial=0.25):
    check = CollapseCheck(action, DeferredChecks("loss"))
    for loss in losses:
        check.observe(torch.tensor(loss), torch.tensor(trivial), advice)
    return check


def test_a_window_at_the_trivial_loss_is_a_collapse():
    with pytest.warns(UserWarning, match=r"constant: for 200 steps its loss .* ratio nan"):
        observed([0.25] * WINDOW)
    with pytest.raises(ModelError, match="the network is constant"):
        observed([0.3] * WINDOW, "stop")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observed([0.25] * (WINDOW - 1))
        observed([0.25] * (3 * WINDOW), "ignore")
        observed([0.25] * 150 + [0.2] + [0.25] * 150)  # one batch that is learned
        observed([0.0] * (2 * WINDOW), trivial=0.0)  # labels that are all equal


def test_losses_that_are_not_finite_are_told():
    with pytest.warns(UserWarning, match="or not finite"):
        observed([math.nan] * WINDOW)
    with pytest.raises(ModelError, match="or not finite"):
        observed([0.25] * 100 + [math.inf] * 100, "stop")


def test_one_warning_for_each_collapse():
    with pytest.warns(UserWarning, match="constant") as found:
        observed([0.25] * (4 * WINDOW))
    assert len(found) == 1


def points(n=100):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] + 0.5 * x[:, 1] > 0).long()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))


def trained(method, steps=WINDOW):
    optimizer = torch.optim.SGD(method.model.parameters(), lr=0.1, momentum=0.9, dampening=0.9)
    x, y = points()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = method.loss(x, y)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@pytest.mark.slow
def test_the_radius_of_the_warning_holds():
    with pytest.warns(UserWarning, match="a radius of about") as found:
        trained(PersistentExcitation(network(), 0.5, steps=1))
    radius = float(str(found[0].message).split("about ")[1].split(" ")[0])
    assert 0 < radius <= 0.5 / 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trained(PersistentExcitation(network(), radius, steps=1)) < 0.8 * 0.25


@pytest.mark.slow
@pytest.mark.parametrize("hidden_radius", [4.0, 0.5])
def test_the_hidden_radius_of_the_warning_holds(hidden_radius):
    def method(rho):
        return AdversarialTraining(network(), 0.01, steps=1, loss="cross-entropy", hidden_radius=rho)

    with pytest.warns(UserWarning, match="a hidden_radius of about") as found:
        trained(method(hidden_radius))
    advised = float(str(found[0].message).split("about ")[1].split(" ")[0])
    assert 0 < advised <= hidden_radius / 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trained(method(advised), 2 * WINDOW) < 0.8 * math.log(2)


def test_the_fraction_that_holds_bounds_the_move_of_outputs():
    output = torch.tensor([[0.0, 0.0], [2.0, 0.0]])  # a distance of 1 from their mean
    assert move_ratio(output, torch.tensor([[3.0, 4.0], [3.0, 4.0]])) == 5
    assert move_ratio(output[:, 0], torch.full((2,), 3.0)) == 3
    assert holding_fraction(100.0) == 0.02
    for unknown in (1.0, 0.0, math.nan, math.inf):  # inf: a batch of one
        assert holding_fraction(unknown) == 0.25


@pytest.mark.parametrize(("options", "says"), [
    ({"hidden_radius": 2.0}, r"a hidden_radius of about 0\.\d+ may hold"),
    ({"hidden_radius": {"2": 2.0, "4": 1.0}}, r"a hidden_radius of about \{'2': 0\.\d+, '4': 0\.\d+\} may hold"),
])  # fmt: skip
def test_collapsed_hidden_layers_stop_as_asked(options, says):
    at = AdversarialTraining(network(), 0.01, steps=1, on_collapse="stop", loss="cross-entropy", **options)
    with pytest.raises(ModelError, match=says):
        trained(at, 3 * WINDOW)


def test_a_captured_loop_asks_for_itself():
    pe = PersistentExcitation(network(), 0.1, on_collapse="stop")
    pe.check_collapse()  # nothing was trained yet
    pe._collapse.steps.fill_(float(WINDOW))  # what a captured step has counted
    with pytest.raises(ModelError, match="the network is constant"):
        pe.check_collapse()


def test_the_trainer_asks_after_every_epoch(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(PersistentExcitation, "check_collapse", lambda self: asked.append(1))
    config = parse_config({
        "data": {"name": "moons"}, "model": {"name": "mlp"}, "excitation": {"radius": 0.1, "steps": 1},
        "optimizer": {"name": "sgd", "lr": 0.1}, "epochs": 2, "batch": 100, "watch": False,
    })  # fmt: skip
    train(config, tmp_path / "run").close()
    assert len(asked) == 2


def test_the_action_is_checked():
    for kind in (PersistentExcitation, AdversarialTraining):
        with pytest.raises(InputError, match="on_collapse: expected 'warn', 'stop' or 'ignore'"):
            kind(network(), 0.1, on_collapse="crash")


METHODS = {
    "excited": lambda: PersistentExcitation(three(), 0.1, classes=3),
    "auto": lambda: PersistentExcitation(three(), "auto", classes=3),
    "adversarial": lambda: AdversarialTraining(three(), 0.1, classes=3, hidden_radius=0.01),
}


def three():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("name", METHODS)
def test_small_and_one_sided_batches_are_taken(name):
    for labels in ([2], [0, 0, 0], [0, 2, 2, 0]):  # one sample; one class; a class missing
        method = METHODS[name]()
        loss = method.loss(torch.randn(len(labels), 8), torch.tensor(labels))
        loss.backward()
        assert math.isfinite(float(loss.detach()))
        assert all(torch.isfinite(p.grad).all() for p in method.model.parameters())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("label", [3, -1])
def test_labels_out_of_range_are_refused(name, label):
    with pytest.raises(InputError, match=f"classes=3 expects 0 to 2; got {label}"):
        METHODS[name]().loss(torch.randn(2, 8), torch.tensor([0, label]))
