"""Certified radii by relaxation: below the margins found, above the Lipschitz bound, refused by name."""

from __future__ import annotations

import pytest
import torch
from benchmarks.exact_margins import random_net
from torch import Tensor, nn

from excite.errors import ModelError
from excite.margin import Margins, SearchOptions, margins
from margin.networks import BOUNDS, trained


@pytest.mark.parametrize("norm", ["inf", *(pytest.param(n, marks=pytest.mark.slow) for n in ("2", "1"))])
def test_radii_lie_between_lipschitz_bound_and_margin(norm: str) -> None:
    model, x, y = trained("mlp")
    x, y = x[:8], y[:8]
    quick = {"steps": 10, "restarts": 1, "evidence": False}
    plain, interval, linear = (
        margins(model, x, y, norm=norm, bounds=BOUNDS, options=SearchOptions(certify=kind, **quick))
        for kind in (True, "interval", "linear")
    )
    assert linear.certified_why == "linear relaxation of the network"
    assert (linear.lower <= linear.values).all()
    assert (linear.lower >= interval.lower * 0.98).all()
    assert (interval.lower >= plain.lower).all()
    assert float(linear.lower.median()) > 0.3 * float(linear.values.median())  # a thin band on a small network


def test_lower_bounds_are_stored() -> None:
    model, x, y, how = random_net(1)
    found = margins(model, x, y, **how, options=SearchOptions(certify="linear", evidence=False, steps=5, restarts=1))
    again = Margins.from_dict(found.to_dict())
    assert torch.equal(again.lower, found.lower)
    assert found.plot().collections  # the band


class Mixed(nn.Module):
    """Rows depend on each other."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0] + x.flip(0)[:, 1]


def test_a_bound_that_is_not_known_is_refused() -> None:
    x, y = torch.randn(4, 3), torch.zeros(4)
    for kind in ("interval", "linear"):
        options = SearchOptions(certify=kind, evidence=False, steps=2, restarts=1)
        with pytest.raises(ModelError, match="layer_norm"):
            margins(nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 1)), x, y, threshold=9, options=options)
        with pytest.raises(ModelError, match="other points of the batch"):
            margins(Mixed(), x, y, threshold=9, bounds=(-9, 9), options=options)
    with pytest.raises(ModelError, match="layer_norm"):
        margins(
            nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 1)),
            x,
            y,
            threshold=9,
            options=SearchOptions(certify="lipschitz", steps=2),
        )
