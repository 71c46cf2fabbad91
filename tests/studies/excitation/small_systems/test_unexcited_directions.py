"""Directions that the data never excite: a node that multiplies, a bias that centring leaves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from excite import PersistentExcitation
from excite.studies.excitation.small_systems import unexcited_directions


def test_extremes_of_the_multiplying_node() -> None:
    """Over the ball of the input, f moves by ε‖w‖₁ + ε²|c|; the search leaves out ε²|c|, and every layer does not."""
    model = unexcited_directions.ProductNode()
    with torch.no_grad():
        model.last.weight.copy_(torch.tensor([[0.5, -1.0, 2.0, -3.0]]))
    x = torch.tensor([[0.0, 0.0, 1.0, 2.0, -1.0]], dtype=torch.float64)
    corners = torch.cartesian_prod(*[torch.tensor([-0.05, 0.05], dtype=torch.float64)] * 5)
    with torch.no_grad():
        moved = float((model(x + corners) - model(x)).abs().max())
        assert moved == pytest.approx(0.05 * 3.5 + 0.05**2 * 3)
        low, high = PersistentExcitation(model, 0.05, layers="input").extremes(x)
        assert float(high - low) / 2 == pytest.approx(0.05 * 3.5)
        low, high = PersistentExcitation(model, 0.05).extremes(x)
        assert float(high - low) / 2 >= 0.05 * (2 * 3.5 + 3) - 1e-9


def test_section_5_2_search_from_zero_never_moves_a_product() -> None:
    """Printed: the node's output is in [−ε², ε²] under perturbed inputs. Signed steps from zero leave it at zero."""
    found = {
        how: unexcited_directions.multiplying_node({"excited": how, "steps": 30}, 0).values
        for how in ("nothing", "input", "exactly", "every layer")
    }
    assert found["nothing"]["wrong"] == found["input"]["wrong"] == 1.0
    assert found["input"]["seen"] == 0.0
    assert found["every layer"]["seen"] == pytest.approx(1 / unexcited_directions.RADIUS)
    assert 1.0 > found["exactly"]["wrong"] > found["every layer"]["wrong"]


def test_centring_is_where_gradient_descent_goes() -> None:
    """Descent with steps that grow as the loss falls reaches the same limit as the hyperplane of least norm."""
    x, s = unexcited_directions.rings(0)
    moved = np.column_stack([(x - x.mean(0)) / 50, np.full(len(x), 1 / 50)]) * s[:, None]
    z = np.zeros(3)
    for step in range(20000):
        weights = np.exp(-(moved @ z) + (moved @ z).min())
        z = z + 2.0 / np.sqrt(step + 1) * weights @ moved / weights.sum()
    margin = (moved @ z).min() * 50 / np.linalg.norm(z[:2])
    found = unexcited_directions.centring({"origin": "mean"}, 0)
    best = unexcited_directions.optimal_hyperplane(x, s).margin
    assert margin / best == pytest.approx(found.values["margin"], rel=0.02)
    assert not found.flags


def test_section_3_1_removing_the_mean_can_cost_margin() -> None:
    """Points whose mean is zero end with a fraction of the margin that the same points have around another origin."""
    values = {
        where: unexcited_directions.centring({"origin": where}, 0).values for where in ("elsewhere", "mean", "support")
    }
    assert values["mean"]["margin"] < 0.5 < 0.9 < values["elsewhere"]["margin"]
    assert values["mean"]["bias"] > 1e-4
    assert values["support"]["bias"] < 1e-9
    assert values["support"]["margin"] == pytest.approx(1.0)
