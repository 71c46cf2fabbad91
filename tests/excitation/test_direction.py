"""Directions of several outputs: how near the search comes to the exact one, unit length, a fallback where nothing moves."""

import itertools

import pytest
import torch
from torch import nn

from excite import InputError, PersistentExcitation
from excite.excitation.direction import any_direction, more_starts, unit, wide
from models import build, with_outputs


def largest_move(weight, norm):
    """max ‖W d‖₂ over the unit ball of d: by its corners, for the infinity and the 1-norm, or the top singular value."""
    if norm == "2":
        return torch.linalg.svdvals(weight)[0]
    if norm == "1":
        return weight.norm(dim=0).max()
    corners = torch.tensor(list(itertools.product((1.0, -1.0), repeat=weight.shape[1])), dtype=weight.dtype)
    return (corners @ weight.T).norm(dim=1).max()


def reached(norm, **options):
    """Of linear models with 3, 5 and 10 outputs: the move that is found over the largest there is."""
    found = []
    for outputs, trial in itertools.product((3, 5, 10), range(5)):
        torch.manual_seed(1000 * outputs + trial)
        model, x = nn.Linear(8, outputs).double(), torch.randn(4, 8, dtype=torch.float64)
        low, high = PersistentExcitation(model, 0.1, norm=norm, classes=outputs, **options).extremes(x)
        found.append((high - low).norm(dim=1) / 0.2 / largest_move(model.weight.detach(), norm))
    return torch.cat(found)


def test_direction_is_exact_for_the_1_norm():
    assert torch.allclose(reached("1"), torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("norm", ["inf", "2"])
def test_several_starts_come_nearer_to_the_exact_direction(norm):
    one, four, eight = (reached(norm, starts=starts) for starts in (1, 4, 8))
    assert one.mean() < 0.93 < 0.96 < four.mean() < eight.mean()
    assert one.min() < 0.7
    assert four.min() > 0.7
    assert eight.min() > 0.8
    assert max(one.max(), eight.max()) <= 1 + 1e-12


@pytest.mark.parametrize("norm", ["inf", "1"])
def test_exact_where_one_of_many_layers_is_perturbed(norm):
    model, x = build("mlp")
    model = with_outputs(model, 3)
    name = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)][-1]
    pe = PersistentExcitation(model, 0.1, norm=norm, layers=[name], classes=3, starts=12, turns=4)
    low, high = pe.extremes(x)  # the last layer: linear in its perturbation
    weight = model.get_submodule(name).weight.detach()
    assert torch.allclose((high - low).norm(dim=1) / 0.2, largest_move(weight, norm))


def test_starts_are_orthogonal_as_long_as_they_can_be():
    start = any_direction(torch.zeros(2, 4, dtype=torch.float64))
    vectors = torch.stack([start, *more_starts(start, 3)])[:, 0]
    assert torch.allclose(vectors @ vectors.T, torch.eye(4, dtype=torch.float64), atol=1e-9)
    many = torch.stack(more_starts(start, 9))
    assert torch.allclose(many.norm(dim=2), torch.ones((), dtype=torch.float64))


def test_without_turns_the_best_of_the_starts_is_kept():
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3).double(), torch.randn(4, 5, dtype=torch.float64)
    pe = PersistentExcitation(model, 0.1, classes=3, turns=0, starts=3)
    start = pe.target.start(model(x).detach())
    candidates = torch.stack([start, *more_starts(start, 2)])  # (3, B, 3)
    best = (candidates @ model.weight).abs().sum(2).argmax(0)
    v = candidates[best, torch.arange(4)]
    low, high = pe.extremes(x)
    assert torch.allclose(high - low, 0.2 * (v @ model.weight).sign() @ model.weight.T)


def test_starts_are_checked():
    with pytest.raises(InputError, match="starts: expected a whole number of at least 1"):
        PersistentExcitation(nn.Linear(3, 3), 0.1, classes=3, starts=0)


def test_any_direction_is_one_unit_vector_for_all_samples():
    v = any_direction(torch.zeros(3, 10))
    assert torch.allclose(v.norm(dim=1), torch.ones(3))
    assert torch.equal(v[0], v[2])
    assert len(v[0].unique()) == 10


def test_unit_keeps_tiny_moves_and_replaces_zero_ones():
    move = torch.tensor([[3e-30, 4e-30], [0.0, 0.0]])
    v = unit(move, otherwise=torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    assert torch.allclose(v, torch.tensor([[0.6, 0.8], [0.0, 1.0]]))


def test_wide_is_single_precision_at_least():
    assert wide(torch.zeros(1, dtype=torch.float16)) == torch.float32
    assert wide(torch.zeros(1, dtype=torch.float64)) == torch.float64
