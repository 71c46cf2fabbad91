"""Multiplicative perturbations: against the exact value where signed steps are exact, against all corners elsewhere."""

import itertools

import pytest
import torch
from torch import nn

from excite import ExciteError, PersistentExcitation, Relative, Stages
from models import CASES, build

DUAL = {"inf": 1, "2": 2, "1": torch.inf}
MULTIPLICATIVE = {"kind": "multiplicative"}
SCALAR = [name for name, case in CASES.items() if case.outputs == 1 and name != "tokens"]


@pytest.mark.parametrize("norm", ["inf", "2", "1"])
@pytest.mark.parametrize("layers", ["input", "all"])
@pytest.mark.parametrize("steps", [1, 4])
def test_a_linear_model_reaches_the_dual_norm_of_its_terms(norm, layers, steps):
    model, x = build("linear")
    low, high = PersistentExcitation(model, 0.4, norm, steps, layers, **MULTIPLICATIVE).extremes(x)
    reach = 0.4 * (model.weight * x).norm(p=DUAL[norm], dim=1)
    clean = model(x).flatten()
    assert torch.allclose(high, clean + reach)
    assert torch.allclose(low, clean - reach)


def corners(net, x, radius):
    """(smallest, largest) output over every corner of the two cubes, of a net of two layers."""
    first, second = net[0], net[2]
    outputs = []
    for d in itertools.product([-radius, radius], repeat=first.in_features):
        h = net[1](first(x * (1 + torch.tensor(d, dtype=x.dtype))))
        # Linear in the factors of the second layer: its extremes are known without a search.
        reach = radius * (second.weight * h).abs().sum(1)
        outputs += [second(h).flatten() + reach, second(h).flatten() - reach]
    return torch.stack(outputs).amin(0), torch.stack(outputs).amax(0)


@pytest.mark.parametrize("seed", range(5))
def test_all_corners_of_a_tiny_network(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 3), nn.Identity(), nn.Linear(3, 1)).double()
    x = torch.randn(16, 4, dtype=torch.float64)
    for activation in (nn.Identity(), nn.LeakyReLU(0.1)):
        net[1] = activation
        low, high = PersistentExcitation(net, 0.2, **MULTIPLICATIVE).extremes(x)
        smallest, largest = corners(net, x, 0.2)
        assert ((high - low) / (largest - smallest)).median() > 0.97
        if isinstance(activation, nn.Identity):  # linear in every factor: nothing lies beyond the corners
            assert (high <= largest + 1e-12).all()
            assert (low >= smallest - 1e-12).all()
    # Positive signals and weights: the signs never change, so that the steps reach the corner exactly.
    for p in net.parameters():
        p.data.abs_()
    low, high = PersistentExcitation(net, 0.2, **MULTIPLICATIVE).extremes(x.abs())
    smallest, largest = corners(net, x.abs(), 0.2)
    assert torch.allclose(low, smallest)
    assert torch.allclose(high, largest)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["inf", "2", "1"])
@pytest.mark.parametrize("name", SCALAR)
def test_every_model_moves_within_the_ball(name, norm):
    model, x = build(name)
    pe = PersistentExcitation(model.eval(), 0.1, norm=norm, output=CASES[name].pick, **MULTIPLICATIVE)
    low, high = pe.extremes(x)
    assert (low <= high).all()
    assert (low < high).any()
    for halves in pe.perturbations(x).values():
        for d in halves:
            if d.shape[0] == len(x):
                assert (d.flatten(1).norm(p=float(norm), dim=1) <= 0.1 * (1 + 1e-12)).all()


def test_scaling_the_signals_changes_nothing():
    # What section 7.2 asks for: the excitation of a hidden layer does not fade as its signals grow.
    model, x = build("mlp")
    factor = PersistentExcitation(model, 0.1, layers=["2"], **MULTIPLICATIVE).extremes(x)
    with torch.no_grad():
        for p in model[0].parameters():
            p *= 1000
        model[2].weight /= 1000
    assert torch.allclose(
        torch.stack(PersistentExcitation(model, 0.1, layers=["2"], **MULTIPLICATIVE).extremes(x)), torch.stack(factor)
    )


def test_bounds_are_kept_and_used():
    model = nn.Linear(3, 1, bias=False).double()
    x = torch.tensor([[0.95, -0.5, 0.0], [-0.98, 1.0, 0.2]], dtype=torch.float64)
    for steps in (1, 4):
        pe = PersistentExcitation(model, 0.5, steps=steps, bounds=(-1, 1), **MULTIPLICATIVE)
        _, high = pe.extremes(x)
        ends = torch.stack([(x * 0.5).clamp(-1, 1), (x * 1.5).clamp(-1, 1)])
        best = (ends * model.weight).amax(0).sum(1)
        assert torch.allclose(high, best)
        assert all((x * (1 + d)).abs().max() <= 1 + 1e-12 for d in pe.perturbations(x)["weight"])


def test_radii_by_layer_stages_classes_and_cross_entropy():
    model, x = build("convolutional-classes")
    y = torch.tensor([0, 3, 1, 2])
    pe = PersistentExcitation(model, Stages({"0": 0.2, "9": 0.4}, 3), classes=4, loss="cross-entropy", **MULTIPLICATIVE)
    pe.advance(0.4)
    found = pe.perturbations(x)
    assert set(found) == {"0", "9"}
    assert found["0"][1].abs().max() == pytest.approx(0.1)
    assert found["9"][1].abs().max() == pytest.approx(0.2)
    pe.loss(x, y).backward()


BAD = {
    "radius one": (lambda m: PersistentExcitation(m, 1.0, **MULTIPLICATIVE), "less than 1.*vanish or flip"),
    "radius one of a layer": (lambda m: PersistentExcitation(m, {"weight": 2}, **MULTIPLICATIVE), "radius 2"),
    "stages to one": (lambda m: PersistentExcitation(m, Stages(1.0), **MULTIPLICATIVE), "less than 1"),
    "relative": (lambda m: PersistentExcitation(m, Relative(0.1), **MULTIPLICATIVE), "relative to the signal already"),
    "relative stages": (lambda m: PersistentExcitation(m, Stages(Relative(0.1)), **MULTIPLICATIVE), "relative"),
    "an unknown kind": (lambda m: PersistentExcitation(m, 0.1, kind="added"), "'additive' or 'multiplicative'; got 'added'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_the_reason(case):
    action, message = BAD[case]
    with pytest.raises(ExciteError, match=message):
        action(nn.Linear(5, 1))
