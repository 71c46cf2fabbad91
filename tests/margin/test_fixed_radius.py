"""Robust accuracy against exact margins of linear models, and against the margins that a minimum-norm search finds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from excite.data import load
from excite.errors import ExciteError, InputError
from excite.excitation import AdversarialTraining
from excite.margin import SearchOptions, margins
from excite.margin.fixed_radius import RobustAccuracy, broken_at, robust_accuracy
from excite.train import build
from models import same_state, state_of


def linear(outputs: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(6, outputs).double()
    x = torch.randn(200, 6, dtype=torch.float64)
    with torch.no_grad():
        y = model(x).argmax(1) if outputs > 1 else (model(x).flatten() > 0.5).long()
    y[::10] = (y[::10] + 1) % max(outputs, 2)  # a tenth is wrong to begin with
    return model, x, y


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "dual"), [("inf", 1), ("2", 2)])
@pytest.mark.parametrize("outputs", [1, 4])
def test_linear_models_to_the_point(norm, dual, outputs):
    model, x, y = linear(outputs)
    with torch.no_grad():
        f, w = model(x), model.weight
        if outputs == 1:
            distance = (f.flatten() - 0.5) * (2 * y - 1) / w.norm(p=dual)
        else:
            each = torch.stack(
                [(f[range(200), y] - f[:, j]) / (w[y] - w[j]).norm(p=dual, dim=1) for j in range(outputs)]
            )
            each[y, range(200)] = torch.inf
            distance = each.amin(0)
    radii = [0.0, 0.05, 0.1, 0.3]
    found = robust_accuracy(model, x, y, radii, norm=norm, classes=outputs if outputs > 1 else None, batch=70, steps=40)
    assert found == pytest.approx([float((distance > r).double().mean()) for r in radii], abs=0.006)
    assert found[0] == pytest.approx(0.9)


def test_points_that_all_break_early_are_not_attacked_again():
    model, x, y = linear(4)
    found = broken_at(model, x, y, [0.0, 100.0, 200.0], classes=4)
    assert set(found.tolist()) == {-torch.inf, 100.0}


def test_bounds_restrict_it_and_nothing_is_changed():
    model, x, y = linear(4)
    x = x.clamp(-0.5, 0.5)
    model.train()
    before = state_of(model)
    open_, closed = (robust_accuracy(model, x, y, [0.4], bounds=b, classes=4) for b in (None, (-0.5, 0.5)))
    assert same_state(before, state_of(model))
    assert open_[0] < closed[0]


@pytest.mark.slow
def test_it_agrees_with_margins_of_a_trained_network():
    data = load("digits", classes=(3, 5, 8), train=200, test=100)
    model = build("small-cnn", outputs=3, seed=3)
    plain = AdversarialTraining(model, 0.0, loss="cross-entropy", classes=3)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(40):
        optimizer.zero_grad()
        plain.loss(data.x_train, data.y_train).backward()
        optimizer.step()
    model.eval()
    found = margins(
        model, data.x_test, data.y_test, bounds=(-1, 1), options=SearchOptions(evidence=False, certify=False)
    )
    radii = [float(found.values.quantile(q)) for q in (0.3, 0.6)]
    shares = robust_accuracy(model, data.x_test, data.y_test, radii, bounds=(-1, 1), classes=3)
    expected = [float((found.values > r).double().mean()) for r in radii]
    assert all(
        share >= least for share, least in zip(shares, expected)
    )  # the search for margins is the stronger attack
    assert shares == pytest.approx(expected, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["inf", "2", "1"])
def test_one_radius_of_a_linear_model_is_exact(norm):
    model, x, y = linear(4)
    truth = margins(model, x, y, norm=norm, options=SearchOptions(evidence=False)).values
    radius = float(truth.median()) * 1.0001
    found = robust_accuracy(model, x, y, radius, norm=norm, classes=4, steps=5, restarts=1)
    assert isinstance(found, RobustAccuracy)
    assert float(found) == pytest.approx(float((truth > radius).double().mean()))
    assert torch.equal(found.broken, truth <= radius)
    assert found.low <= found.value <= found.high
    assert found.certified is None or found.certified <= found.value
    assert f"{found.value:.1%}" in str(found)


@pytest.mark.slow
def test_one_radius_finds_what_the_quick_attack_misses():
    """Gradients that vanish at the points: the quick attack sees nothing, the search does and says so."""

    class Steps(torch.nn.Linear):
        def forward(self, x):
            return super().forward((x * 8).round() / 8 + 0 * x)

    torch.manual_seed(0)
    model, x = Steps(2, 3), torch.rand(40, 2, generator=torch.Generator().manual_seed(0)) * 2
    y = model(x).argmax(1)
    quick = robust_accuracy(model, x, y, [0.5], classes=3, steps=5)[0]
    found = robust_accuracy(model, x, y, 0.5, classes=3, steps=5)
    assert found.value < quick
    assert not found.trusted
    assert "not to be trusted" in str(found)


def test_eps_is_one_radius_and_classes_are_counted():
    model, x, y = linear(4)
    quick = {"steps": 3, "search": SearchOptions(steps=4, restarts=1, evidence=False, certify=False)}
    found, expected = (
        robust_accuracy(model, x, y, eps=0.1, **quick),
        robust_accuracy(model, x, y, 0.1, classes=4, **quick),
    )
    assert found.radius == 0.1
    assert torch.equal(found.broken, expected.broken)
    scalar, x, y = linear(1)
    assert robust_accuracy(scalar, x, y, [0.1], steps=3) == robust_accuracy(scalar, x, y, [0.1], classes=None, steps=3)


def test_no_point_left_needs_no_search():
    model, x, y = linear(4)
    found = robust_accuracy(model, x, y, 1e3, classes=4, steps=5)
    assert found.value == 0
    assert found.margins is None
    assert found.trusted


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"radii": [0.2, 0.1]}, "ascending"),
        ({"radii": []}, "ascending"),
        ({"radii": -0.1}, "radii"),
        ({"radii": True}, "radii"),
        ({"radii": 0.1, "search": 3}, "SearchOptions"),
        ({"search": SearchOptions(steps=4)}, "one radius only"),
        ({"eps": 0.1}, "either radii or eps"),
        ({"radii": None}, "either radii or eps"),
        ({"radii": None, "eps": -1}, "eps"),
        ({"restarts": 0}, "restarts"),
        ({"x": torch.zeros(0, 6)}, "at least one"),
        ({"y": torch.zeros(3)}, "as many labels"),
    ],
)
def test_bad_input(change, match):
    model, x, y = linear(4)
    with pytest.raises(InputError, match=match):
        robust_accuracy(**{"model": model, "x": x, "y": y, "radii": [0.1], "classes": 4, **change})


def test_lazy_modules_are_refused_before_a_pass() -> None:
    model = torch.nn.LazyLinear(3)
    with pytest.raises(ExciteError, match="not initialized yet"):
        robust_accuracy(model, torch.rand(4, 5), torch.tensor([0, 1, 2, 0]), 0.1)
    assert torch.nn.parameter.is_lazy(model.weight)
