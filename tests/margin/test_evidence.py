"""A user must be able to tell a robust network from a masked gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from excite.margin import Evidence, SearchOptions, margins
from margin.networks import BOUNDS, trained


class Wrapped(nn.Module):
    """A network behind functions that keep its decisions, or nearly, and spoil its gradients."""

    def __init__(
        self, model: nn.Module, before: Callable[[Tensor], Tensor] | None, after: Callable[[Tensor], Tensor] | None
    ):
        super().__init__()
        self.model, self.before, self.after = model, before, after

    def forward(self, x: Tensor) -> Tensor:
        f = self.model(x if self.before is None else self.before(x))
        return f if self.after is None else self.after(f)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["inf", pytest.param("2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["mlp", "convolutional", "excited", "classes", "robust classes", "linear"])
def test_honest_networks_are_trusted(kind: str, norm: str) -> None:
    model, x, y = trained(kind)
    found = margins(model, x, y, norm=norm, bounds=BOUNDS)
    assert found.trusted, found.flags
    assert found.suspect.double().mean() <= 0.05
    assert "the search worked" in str(found)


def test_a_very_robust_network_is_trusted() -> None:
    # All margins are larger than the whole spread of the data, but the search reaches them.
    model = nn.Linear(10, 1).double()
    with torch.no_grad():
        model.weight.fill_(0.01)
        model.bias.fill_(2.0)
    x = torch.randn(40, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = margins(model, x, torch.ones(40))
    assert found.trusted
    assert found.median > 5


MASKS: dict[str, tuple[str, Callable[[Tensor], Tensor] | None, Callable[[Tensor], Tensor] | None]] = {
    "rounded inputs": ("classes", lambda x: torch.round(4 * x) / 4, None),
    "rounded outputs": ("classes", None, torch.round),
    "saturated outputs": ("convolutional", None, lambda f: torch.sigmoid(1000 * (f - 0.5))),
    "stairs": ("convolutional", None, lambda f: torch.round(4 * f + 0.5) / 4 - 0.125),
    "shattered gradients": ("classes", lambda x: x + 0.003 * torch.sin(3000 * x), None),
}


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["inf", pytest.param("2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mask", MASKS)
def test_masked_gradients_are_flagged_and_their_margins_lowered(mask: str, norm: str) -> None:
    kind, before, after = MASKS[mask]
    model, x, y = trained(kind)
    masked = Wrapped(model, before, after)
    found = margins(masked, x, y, norm=norm, bounds=BOUNDS, perturbations=True)
    naive = margins(masked, x, y, norm=norm, bounds=BOUNDS, options=SearchOptions(evidence=False))
    assert not found.trusted
    assert found.flags
    assert found.suspect.double().mean() > 0.5
    assert "not to be trusted" in str(found)
    # what the gradient-free search finds counts, and is real
    assert (found.values <= naive.values * (1 + 1e-3)).all()
    assert found.evidence.beaten <= 0.05 * found.evidence.checked or found.values.mean() < naive.values.mean()
    attacked = found.values > 0
    broken = masked(x + found.perturbations)
    wrong = broken.argmax(1) != y if kind == "classes" else (broken[:, 0] > 0.5).long() != y
    assert wrong[attacked].all()


@pytest.mark.slow
def test_points_missed_by_gradients_have_margins_and_are_counted() -> None:
    # Flat towards every side near the data, but decided otherwise far away: no gradient leads there.
    class Plateau(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x[:, :1] > 0).to(x) + 0 * x[:, :1]

    x = torch.cat([torch.full((20, 30), -1.0), torch.full((20, 30), 1.0)])
    x = x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    found = margins(Plateau(), x, y, norm="2")
    assert not found.censored.any()
    assert found.evidence.flat == 40
    assert not found.trusted
    exact = x[:, 0].abs()
    assert (found.values >= 0.999 * exact).all()


@pytest.mark.slow
def test_without_evidence_nothing_is_claimed() -> None:
    model, x, y = trained("mlp")
    found = margins(model, x, y, bounds=BOUNDS, options=SearchOptions(evidence=False))
    assert found.evidence is None
    assert found.suspect is None
    assert not found.trusted
    assert found.flags == ()
    assert "not requested" in str(found)


def test_one_doubtful_point_is_tolerated_and_all_of_them_are_not() -> None:
    def evidence(attacked: int, beaten: int) -> Evidence:
        return Evidence(attacked, 0, 0, 0, 0, 0, attacked, beaten, 0)

    assert not evidence(10, 1).flags()
    assert evidence(10, 2).flags()
    assert evidence(1, 1).flags()
    assert not evidence(100, 5).flags()
    assert evidence(100, 6).flags()
    assert not evidence(0, 0).flags()
