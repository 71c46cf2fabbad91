"""A budget is kept, says what it left out, and costs quality instead of failing."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from torch import Tensor, nn

from excite.errors import InputError
from excite.margin import SearchOptions, margins
from excite.margin.budget import Effort, affordable, left_out
from margin.networks import BOUNDS, trained


class Counted(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.passes = model, 0

    def forward(self, x: Tensor) -> Tensor:
        f = self.model(x)
        self.passes += len(x)
        if f.requires_grad:
            f.register_hook(self._count)
        return f

    def _count(self, gradient: Tensor) -> None:
        self.passes += len(gradient)


@pytest.mark.parametrize("passes", [50, 100, 400])
@pytest.mark.parametrize("kind", ["mlp", pytest.param("classes", marks=pytest.mark.slow)])
def test_passes_stay_within_the_budget(kind: str, passes: int) -> None:
    model, x, y = trained(kind)
    x, y = x[:24], y[:24]
    counted = Counted(model)
    options = SearchOptions(evidence=False, certify=False, budget=(passes, "passes"))
    result = margins(counted, x, y, bounds=BOUNDS, options=options)
    correct = int((result.values > 0).sum())
    # besides the search: the clean outputs of all points, and two passes of 16 that show whether the model is deterministic
    assert counted.passes <= passes * correct + len(x) + 2 * 16
    assert f"budget of {passes} passes per point" in result.left_out
    assert result.left_out in str(result)
    full = margins(model, x, y, bounds=BOUNDS, options=SearchOptions(evidence=False, certify=False))
    assert full.left_out is None
    assert (result.values >= full.values * 0.99).all()
    assert result.median <= 1.5 * full.median  # worse, but of use


def test_what_is_left_out_grows_as_the_budget_shrinks() -> None:
    full = Effort(3, 40, 9, classes=10)
    costs = [affordable(full, passes).cost for passes in (10_000, 500, 300, 150, 80, 45)]
    assert costs == sorted(costs, reverse=True)
    assert all(cost <= passes for cost, passes in zip(costs, (10_000, 500, 300, 150, 80, 45)))
    assert left_out(full, full, (10_000, "passes"), 3) is None
    said = left_out(full, affordable(full, 150), (150, "passes"), 3)
    assert "1 of 3 searches" in said
    assert "3 points without an adversarial example" in said


def test_too_few_seconds_are_refused_in_seconds() -> None:
    full = Effort(restarts=3, steps=40, targets=9, classes=10)
    least = replace(full, restarts=1, steps=2, targets=0).cost
    with pytest.raises(InputError, match=re.escape(f"at least {0.5 * least:.2g} seconds")):
        affordable(full, 1, seconds=0.5)


@pytest.mark.slow
def test_seconds_give_a_search_too() -> None:
    model, x, y = trained("mlp")
    result = margins(
        model, x[:8], y[:8], bounds=BOUNDS, options=SearchOptions(evidence=False, budget=(3600, "seconds"))
    )
    assert result.left_out is None


@pytest.mark.parametrize(
    "budget", [5, "60 s", (5, "hours"), (0, "seconds"), (float("nan"), "passes"), (1, "passes"), (10,)]
)
def test_a_bad_budget_is_refused(budget: object) -> None:
    model, x, y = trained("mlp")
    with pytest.raises(InputError, match="budget"):
        margins(model, x[:4], y[:4], bounds=BOUNDS, options=SearchOptions(evidence=False, budget=budget))
