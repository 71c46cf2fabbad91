"""Regression (section 5.2): the loss is that of the true extremes, found by trying every corner of the balls."""

import itertools
import math

import pytest
import torch
from torch import nn

from excitation.refusing import refusing
from excite import PersistentExcitation
from models import build, with_outputs

Y = torch.tensor([0, 3, 1, 2])


def corners(model, x, radius):
    """f(x; d) at all corners d of the infinity-norm balls of both layers of a tiny network, (2^n, k); x of one sample."""
    first, second = model[0], model[2]
    found = []
    for signs in itertools.product((-1.0, 1.0), repeat=first.in_features + second.in_features):
        d = radius * torch.tensor(signs, dtype=torch.float64)
        hidden = model[1](first(x + d[: first.in_features]))
        found.append(second(hidden + d[first.in_features :]))
    return torch.cat(found)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_regression_loss_is_that_of_the_true_extremes(shape):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.LeakyReLU(0.5), nn.Linear(3, 1)).double()
    x, y = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, *shape, dtype=torch.float64) * 3
    pe = PersistentExcitation(model, 0.01, targets="values")
    expected = []
    for one, target in zip(x, y.flatten()):
        outputs = corners(model, one[None], 0.01)
        expected.append(0.5 * (outputs.min() - target) ** 2 + 0.5 * (outputs.max() - target) ** 2)
    assert torch.allclose(pe.losses(x, y), torch.stack(expected), rtol=1e-9)
    assert torch.allclose(pe.predict(x), model(x).flatten())


def test_vector_targets_are_moved_as_far_as_can_be():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.LeakyReLU(0.5), nn.Linear(3, 2)).double()
    x, y = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    pe = PersistentExcitation(model, 0.01, targets="values", starts=4, turns=3)
    low, high = pe.extremes(x)
    assert torch.allclose(pe.losses(x, y), 0.5 * ((low - y) ** 2 + (high - y) ** 2).sum(1))
    for i, one in enumerate(x):
        furthest = (corners(model, one[None], 0.01) - model(one[None])).norm(dim=1).max()
        assert float((high[i] - model(one)).norm().detach()) == pytest.approx(float(furthest.detach()), rel=1e-6)
    plain = PersistentExcitation(model, 0.0, targets="values").loss(x, y)
    assert torch.allclose(plain, (model(x) - y).square().sum(1).mean())


def test_regression_on_labels_is_the_binary_loss():
    model, x = build("mlp")
    labels = torch.tensor([0, 1, 1, 0])
    for loss in ("loss", "losses"):
        values = getattr(PersistentExcitation(model, 0.1, targets="values"), loss)(x, labels.double())
        assert torch.equal(values, getattr(PersistentExcitation(model, 0.1), loss)(x, labels))


def regression(outputs=1, **options):
    model, x = build("mlp", batch=4)
    model = with_outputs(model, outputs)
    return PersistentExcitation(model, **{"radius": 0.1, "targets": "values", **options}), x


def regress(y, outputs=1, **options):
    pe, x = regression(outputs, **options)
    return pe.loss(x, y)


test_regression_refuses = refusing({
    "integers": (lambda: regress(Y), "expects floating-point numbers; got torch.int64"),
    "too many": (lambda: regress(torch.rand(4, 2)), r"one for each output, \(4,\); got \(4, 2\)"),
    "too few": (lambda: regress(torch.rand(4), 3), r"one for each output, \(4, 3\); got \(4,\)"),
    "another batch": (lambda: regress(torch.rand(3)), r"expected shape \(4,\) or \(4, k\) for 4 inputs"),
    "NaN": (lambda: regress(torch.tensor([0.0, 1.0, math.nan, 2.0])), "expected finite numbers"),
    "a list": (lambda: regress([0.0] * 4), "expected a tensor"),
    "not asked for": (lambda: regress(torch.rand(4), targets="labels"), "targets='values' for a regression"),
    "classes": (lambda: regression(classes=3), "classes: targets='values' is a regression"),
    "hierarchy": (lambda: regression(hierarchy=[0, 1]), "hierarchy: targets='values' is a regression"),
    "threshold": (lambda: regression(threshold=0.5), "threshold: targets='values' is a regression"),
    "cross-entropy": (lambda: regression(loss="cross-entropy"), "the squared error only"),
    "another word": (lambda: regression(targets="numbers"), "targets: expected 'labels', 'values'"),
    "auto": (lambda: regression(radius="auto"), "auto"),
})  # fmt: skip


def test_regression_keeps_a_noisy_line_flatter():
    # Theorem 6: excitation of a linear model is a penalty on its weight.
    x, y = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None], 2 * torch.linspace(-1, 1, 40, dtype=torch.float64)
    slopes = []
    for radius in (0.0, 0.5):
        model = nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.2)
        pe = PersistentExcitation(model, radius, targets="values")
        for _ in range(200):
            optimizer.zero_grad()
            pe.loss(x, y).backward()
            optimizer.step()
        slopes.append(float(model.weight.detach()))
    variance = float(x.square().mean())
    assert slopes[0] == pytest.approx(2, rel=1e-6)
    assert slopes[1] == pytest.approx(2 * variance / (variance + 0.25), rel=1e-6)  # min E(wx − y)² + ε²w²
