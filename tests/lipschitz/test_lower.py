"""Search for the largest constant against dense sampling."""

from __future__ import annotations

import pytest
import torch

from excite.errors import InputError
from excite.lipschitz import bound, largest, local
from lipschitz.helpers import mlp


@pytest.mark.parametrize("ball", ["inf", "2"])
def test_search_finds_more_than_the_points_and_stays_inside(ball: str) -> None:
    model = mlp(3, 12, 10, 1, seed=4)
    x = torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state = torch.get_rng_state()
    found = largest(model, x, 2.0, ball=ball, bounds=(-3, 3))
    assert torch.equal(state, torch.get_rng_state())
    assert found.value == pytest.approx(float(local(model, found.point[None])), rel=1e-12)
    assert float(local(model, x).max()) < found.value <= float(bound(model, x, "2"))
    order = float("inf") if ball == "inf" else 2.0
    assert float(torch.linalg.vector_norm(found.point - x, ord=order, dim=1).min()) <= 2 + 1e-9
    assert found.point.abs().max() <= 3
    many = 6 * torch.rand(200_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(9)) - 3
    near = torch.cdist(many, x, p=order).amin(1) <= 2
    assert found.value >= 0.98 * float(local(model, many[near]).max())
    assert largest(model, x, 0.0).value == float(local(model, x).max())
    assert str(found).startswith("Lipschitz constant at least")


def test_what_search_refuses() -> None:
    model, x = mlp(3, 5, 1), torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(InputError, match="radius"):
        largest(model, x, -1.0)
    with pytest.raises(InputError, match="at least one"):
        largest(model, x[:0], 1.0)
    with pytest.raises(InputError, match="round"):
        largest(model, x, 1.0, rounds=0)
