"""Theorem 2 of "What training reveals" on networks: bounds against exact slopes, statuses, errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from excite.bounds import empty_region
from excite.bounds.relu_network import relu_network
from excite.bounds.trajectory.patterns import patterns, slopes, steepest
from excite.errors import InputError, ModelError
from excite.lipschitz import local
from models import same_state, state_of


def network(*widths: int, sigmoid: bool = False, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(widths):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1], *([nn.Sigmoid()] if sigmoid else [])).double()


def points(count: int, size: int = 2, seed: int = 1) -> Tensor:
    return 2 * torch.randn(count, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("form", ["stated", "point"])
@pytest.mark.parametrize("widths", [(2, 7, 1), (2, 6, 5, 1), (3, 5, 4, 4, 1)])
def test_the_bound_is_above_the_slope_wherever_it_speaks(widths: tuple[int, ...], form: str, sigmoid: bool) -> None:
    shares = []
    for seed in range(5):
        model = network(*widths, sigmoid=sigmoid, seed=seed)
        x, new = points(60, widths[0]), points(400, widths[0], seed=2)
        before = state_of(model)
        found = empty_region(model, x, None, new, form=form)
        assert same_state(before, state_of(model))
        assert found.holds
        assert found.terms["gamma"] == 0
        truth = local(model, new)
        assert (truth <= found.values * (1 + 1e-9) + 1e-15).all()
        shares.append(found.share_empty)
        inside = found.reached & ~found.empty
        assert inside.any()
        assert (found.reached | found.empty).all()
        if form == "point":
            stated = empty_region(model, x, None, new)
            assert (found.values <= stated.values * (1 + 1e-9)).all()
    assert any(share > 0.05 for share in shares)
    assert any(share < 0.95 for share in shares) or len(widths) == 3


@pytest.mark.slow
def test_bounds_where_exact_coefficients_have_too_many_digits() -> None:
    """256 units: coefficients are ratios of determinants of 400 bits. The value stays a bound, and says what was added."""
    model, x, new = network(10, 256, 1), points(300, 10), points(4, 10, seed=2)
    found = empty_region(model, x, None, new)
    assert found.holds
    assert found.reached.all()
    assert 0 < found.terms["rounding"] < 1e-3 * float(found.values.min())
    assert (local(model, new) <= found.values).all()


def test_no_combination_is_steeper_than_the_sum_over_paths() -> None:
    net = relu_network(network(3, 5, 4, 1), points(2, 3))
    w1, w2, w3 = net.weights
    paths = torch.einsum("oj,ji,in->jin", w3, w2, w1).flatten(
        0, 1
    )  # (units, inputs): what each path adds to the gradient
    assert steepest(net) == pytest.approx(float(paths.norm()))
    assert float(torch.linalg.matrix_norm(paths, 2)) <= steepest(net)


def test_slopes_of_patterns_are_gradients() -> None:
    model, x = network(3, 6, 5, 1), points(20, 3)
    net = relu_network(model, x)
    bias, steep = slopes(net, patterns(net, x))
    torch.testing.assert_close(steep, local(model, x))
    shift = torch.zeros(20, 6, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model[1:](model[0](x) + shift).sum(), shift)
    torch.testing.assert_close(bias, gradient.norm(dim=1))


def test_phi_of_the_run_and_the_gamma_that_it_needs() -> None:
    model, x, new = network(2, 6, 5, 1), points(50), points(100, seed=2)
    exact = empty_region(model, x, None, new)
    net = relu_network(model, x)
    phi, steep = slopes(net, patterns(net, x))
    same = empty_region(model, x, phi, new)
    torch.testing.assert_close(same.values, exact.values)
    late = empty_region(model, x, phi / 2, new)  # measured when slopes were half of what they are
    assert late.holds
    assert 0.5 < late.terms["gamma"] <= 1
    refused = empty_region(model, x, phi / 2, new, gamma=0.1)
    assert not refused.holds
    assert refused.values.isnan().all()
    assert "failed" in str(refused)
    steady = empty_region(model, x, float(phi.max()), new)
    assert (steady.values >= exact.values * (1 - 1e-9)).all()
    tighter = empty_region(model, x, steep, new, beta=1.0)  # what figure 6 of the paper shows
    assert (tighter.values <= exact.values * (1 + 1e-9)).all()
    assert (local(model, new) <= tighter.values * (1 + 1e-9)).all()
    no_room = empty_region(model, x, 0.0, new)
    assert not no_room.holds
    assert no_room.values.isnan().all()


def test_mu_must_cover_all_training_points() -> None:
    """As printed μ_T has each point's output at the step it was sampled. One training point, x = 5, sampled when its output was
    0.7; later the last weight has grown and the output is σ(5), with the same slope there: Assumption 1 holds with γ = 0. At
    a new point of the same region the slope is 7.9, the printed bound 0.25."""

    def pairs(last: float, shift: float) -> list[tuple[Tensor, Tensor]]:
        one = torch.ones(1, 1, dtype=torch.float64)  # f = σ(last · (x + 10) + shift) where x > −10
        return [(one, 10 * one[0]), (last * one, shift * one[0])]

    x = torch.tensor([[5.0]], dtype=torch.float64)
    steep = float(torch.sigmoid(x) * torch.sigmoid(-x))
    last = 0.7 * 0.3 / steep
    early, late = pairs(1.0, math.log(7 / 3) - 15), pairs(last, 5 - 15 * last)
    new = torch.tensor([[15 - 5 / last - 10]], dtype=torch.float64)  # where the late network's output is one half
    first = empty_region(early, x, None, x, sigmoid=True)
    assert first.terms["mu"] == pytest.approx(0.3)
    phi = first.terms["phi"]
    assert phi == pytest.approx(0.21)  # the slope of the late network at x as well
    printed = 0.25 / (0.3 * 0.7) * phi  # (1 + γ) β = 1
    truth = 0.25 * last
    assert printed == pytest.approx(0.25)
    assert truth == pytest.approx(7.9, rel=0.01)
    found = empty_region(late, x, phi, new, sigmoid=True)
    assert found.terms["gamma"] == pytest.approx(0, abs=1e-9)
    assert float(found.values) == pytest.approx(truth, rel=1e-9)
    wrong = empty_region(late, x, phi, new, sigmoid=True, mu=0.3)
    assert not wrong.holds
    assert wrong.values.isnan().all()


def test_more_patterns_than_the_program_takes() -> None:
    model, x, new = network(2, 6, 5, 1), points(200), points(300, seed=2)
    whole = empty_region(model, x, None, new)
    part = empty_region(model, x, None, new, limit=10)
    assert part.holds
    assert part.terms["patterns"] <= 10
    assert part.terms["kept"] + part.terms["left out"] == 200
    assert 0 < part.terms["left out reached"] < 1 <= part.terms["left out ratio"] + 1e-9
    assert (part.values >= whole.values * (1 - 1e-9)).all()
    assert part.share < whole.share
    assert torch.equal(part.empty, whole.empty)  # a region is not empty because its point was left out


def test_certain_networks_and_dead_ones() -> None:
    model = network(2, 5, 1, sigmoid=True)
    with torch.no_grad():
        model[2].weight.mul_(1e4)  # outputs round to 0 and 1
    found = empty_region(model, points(30), None, points(50, seed=2))
    assert not found.holds or math.isfinite(found.terms["xi"])
    dead = network(2, 5, 1)
    with torch.no_grad():
        dead[0].weight.zero_()
        dead[0].bias.fill_(-1.0)
    quiet = empty_region(dead, points(10), None, points(10, seed=2))
    assert quiet.holds
    assert (quiet.values == 0).all()


def test_what_is_refused() -> None:
    model, x = network(2, 5, 1), points(10)
    with pytest.raises(ModelError, match="ReLU"):
        empty_region(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double(), x, None, x)
    conv = nn.Sequential(nn.Conv1d(1, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4, 1)).double()
    with pytest.raises(ModelError, match="not affine"):
        empty_region(
            nn.Sequential(conv[0], nn.MaxPool1d(2), conv[1:3], nn.Linear(2, 1)).double(), x[:, None], None, x[:, None]
        )
    with pytest.raises(InputError, match="beta"):
        empty_region(conv, x[:, None], 1.0, x[:, None])
    with pytest.raises(ModelError, match="sigmoid"):
        empty_region(nn.Sequential(*network(2, 5, 1), nn.Tanh()), x, None, x)
    with pytest.raises(InputError, match="one output"):
        empty_region(network(2, 5, 3), x, None, x)
    with pytest.raises(InputError, match="new points"):
        empty_region(model, x, None, points(5, 3))
    with pytest.raises(InputError, match="phi"):
        empty_region(model, x, torch.ones(3), x)
    with pytest.raises(InputError, match="phi"):
        empty_region(model, x, math.nan, x)
    with pytest.raises(InputError, match="form"):
        empty_region(model, x, None, x, form="other")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="gamma"):
        empty_region(model, x, None, x, gamma=-1.0)
    with pytest.raises(InputError, match="limit"):
        empty_region(model, x, None, x, limit=0)
