"""The synthetic sets follow the formulas of the papers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from excite.data import load


def test_boundaries_are_where_the_paper_has_them() -> None:
    data = load("boundaries", train=4000)
    x, y = data.x_train.double(), data.y_train
    assert y.bincount().tolist() == [2000, 2000]
    for points, center in ((x[y == 0], (7, 19)), (x[y == 1][:1000], (0, 5)), (x[y == 1][1000:], (11, 27))):
        assert torch.allclose(points.mean(0), torch.tensor(center).double(), atol=0.06)
        assert torch.allclose(points.std(0), torch.full((2,), 0.5).double(), atol=0.05)
    assert load("boundaries").y_train.bincount().tolist() == [8, 8]


def test_linear_margins_follow_their_formulas() -> None:
    x = load("linear-margins-1").x_train.double()
    for i in range(20):
        t = 2 * math.pi * i / 20
        assert x[i].tolist() == pytest.approx([-35 + 58 * math.cos(t), -35 + 58 * math.sin(t - math.pi / 8)], abs=1e-4)
        assert x[20 + i].tolist() == pytest.approx(
            [35 + 35 * math.cos(t), 35 + 35 * math.sin(t - math.pi / 2.3)], abs=1e-4
        )
    second = load("linear-margins-2")
    u, y = second.x_train[:, 0], second.y_train
    assert torch.allclose(second.x_train[:, 1], 10 + 20 * u)
    assert bool(((u[y == 0] <= 2) & (u[y == 0] >= 1.2)).all())
    assert bool(((u[y == 1] <= 4) & (u[y == 1] >= 3.2)).all())
    assert len(second.x_test) == 0


@pytest.mark.parametrize("omega", [0.25, 1.0])
def test_frequencies_are_the_formula_on_an_embedded_square(omega: float) -> None:
    data = load("frequencies", omega=omega, seed=5)
    x = torch.cat([data.x_train, data.x_test]).double()
    y = torch.cat([data.y_train, data.y_test]).double()
    # Both parts lie in one plane, at the distances of the square times ten; find the coordinates again up to rotation.
    _, singular, _ = torch.linalg.svd(x)
    assert float(singular[2]) < 1e-4 * float(singular[1])
    assert float(x.norm(dim=1).max()) <= 10 * math.sqrt(2) + 1e-4
    rng = np.random.default_rng([5, 2])
    q, r = np.linalg.qr(rng.standard_normal((10, 2)))
    z = x.numpy() @ (q * np.sign(np.diag(r))) / 10
    expected = np.cos(2 * np.pi * omega * z[:, 0]) * np.cos(2 * np.pi * omega * z[:, 1])
    assert np.allclose(y.numpy(), expected, atol=1e-5)
    assert data.classes == ()


def test_test_points_are_independent_of_the_training_set_size() -> None:
    for name in ("moons", "frequencies", "boundaries"):
        assert torch.equal(load(name, train=20).x_test, load(name, train=50).x_test)
