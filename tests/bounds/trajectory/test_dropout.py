"""Theorem 3 of "What training reveals": what it is made of, what of it fails, and the program that holds beside it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from excite.bounds import covering_number, dropout_generalization
from excite.errors import InputError
from excite.lipschitz import largest, local
from excite.train import train_with_dropout

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]


def blobs(count: int, seed: int, apart: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 2, (count,), generator=generator)
    x = 0.5 * torch.randn(count, 2, generator=generator).double() + apart * (2 * y[:, None] - 1)
    return x, y


def network(*widths: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [layer for n, m in itertools.pairwise(widths) for layer in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).double()


def basis_exists(covers: list[Rectangle], rows: int, columns: int) -> bool:
    """Whether subrectangles of the rectangles, one each and possibly empty, fill the grid exactly once, by trying all."""

    def inside(rectangle: Rectangle) -> set[frozenset[tuple[int, int]]]:
        parts = [[c for n in range(len(side) + 1) for c in itertools.combinations(side, n)] for side in rectangle]
        return {frozenset(itertools.product(a, b)) for a in parts[0] for b in parts[1]}

    def fill(left: frozenset[tuple[int, int]], todo: list[Rectangle]) -> bool:
        if not todo:
            return not left
        return any(part <= left and fill(left - part, todo[1:]) for part in inside(todo[0]))

    return fill(frozenset(itertools.product(range(rows), range(columns))), covers)


def test_claim_1_fails_for_two_hidden_layers_of_width_3() -> None:
    """Three points activate units {1, 2}, {2, 3}, {1, 3} of both layers. Together they activate every path, but each has paths
    of its own at two corners, so that none can be cut down, and whole they overlap: dropout cannot make them a basis."""
    sides = [(0, 1), (1, 2), (0, 2)]
    covers: list[Rectangle] = [(side, side) for side in sides]
    paths = sum(np.outer(*(np.isin(range(3), side).astype(int) for side in pair)) for pair in covers)
    assert (paths >= 1).all()  # a covering set
    assert not basis_exists(covers, 3, 3)
    product = np.outer(*(sum(np.isin(range(3), side).astype(int) for side in sides) for _ in range(2)))
    assert (paths != product).any()  # the equation of the proof: a sum of Kronecker products is not their product


def test_claim_1_holds_for_two_layers_of_width_2() -> None:
    """So the counterexample is small: no three sets fail at width 2."""
    sides = [side for n in (1, 2) for side in itertools.combinations(range(2), n)]
    rectangles = list(itertools.product(sides, sides))
    for covers in itertools.combinations_with_replacement(rectangles, 3):
        whole = set().union(*(itertools.product(*cover) for cover in covers))
        assert len(whole) < 4 or basis_exists(list(covers), 2, 2)


@pytest.mark.parametrize("units", [1, 2])
def test_lambda_steady_is_no_bound_for_one_or_two_hidden_units(units: int) -> None:
    """log 1 = 0 and log 2 < 1: with all units active at all points and outputs near one half it is too small."""
    x, _ = blobs(20, 0)
    y = torch.arange(20) % 2  # nothing to learn: outputs stay near one half
    model = network(2, units, 1)
    with torch.no_grad():
        model[0].weight.copy_(torch.ones(units, 2))
        model[0].bias.fill_(20.0)  # every unit is active everywhere
        model[2].weight.fill_(0.01)
        model[2].bias.fill_(-0.2 * units)
    run = train_with_dropout(model, x, y, 400, 1e-6, tail=400)
    found = dropout_generalization(run, x, x)
    assert run.p_min == 1
    assert run.changed == 0
    assert found.steady < 0.95 * found.found
    assert (local(run.module(), x) <= found.program.values * (1 + 1e-9)).all()  # what holds, holds


@pytest.mark.slow
@pytest.mark.parametrize("where", ["end", "forward"])
@pytest.mark.parametrize("widths", [(2, 6, 1), (2, 5, 4, 1)])
def test_the_program_over_dropout_patterns_holds(widths: tuple[int, ...], where: str) -> None:
    x, y = blobs(60, 1)
    new, _ = blobs(200, 2)
    run = train_with_dropout(network(*widths), x, y, 3000, 0.02, where=where, tail=800, decay=0.01)  # type: ignore[arg-type]
    found = dropout_generalization(run, x, new)
    module = run.module()
    assert found.program.holds
    assert found.program.share > 0.5
    assert (local(module, new) <= found.program.values * (1 + 1e-9) + 1e-15).all()
    assert local(module, new).max() <= found.found * (1 + 1e-9) <= found.product * (1 + 1e-9)
    assert found.found == pytest.approx(largest(module, torch.cat([x, new]), _reach(x, new)).value)
    terms = found.terms
    c = (
        (1 + terms["gamma"]) * terms["beta"] / (terms["mu"] * (1 - terms["mu"]) * terms["p_min"])
        if terms["p_min"]
        else math.inf
    )
    assert found.steady == pytest.approx(c * terms["phi"] / 4 * math.log(terms["units"]))
    assert not found.holds  # gaps in a proof cannot be checked away
    one = found.lemma4["the product of norms (holds)"]
    assert one.radius == pytest.approx(terms["margin"] / (2 * found.product))
    assert one.vacuous == (one.bounds[0] >= 1)
    assert "heuristic" in str(found)


def _reach(x: Tensor, new: Tensor) -> float:
    around = torch.cat([x, new])
    return 0.1 * float((around - around.mean(0)).norm(dim=1).max())


@pytest.mark.slow
def test_lambda_steady_above_every_constant_found_as_a_rate() -> None:
    """Where a classifier has grown certain, ¼ / (μ (1 − μ)) makes it so large that it says nothing, but it is above."""
    above = 0
    for seed in range(6):
        x, y = blobs(60, seed)
        run = train_with_dropout(network(2, 6, 4, 1, seed=seed), x, y, 2000, 0.02, decay=0.01, seed=seed)
        found = dropout_generalization(run, x, x)
        above += found.steady >= found.found
    assert above == 6


def test_statuses_of_assumptions() -> None:
    x, y = blobs(40, 1)
    model = network(2, 6, 1)
    with torch.no_grad():
        model[0].weight[0] = 0.0
        model[0].bias[0] = -1.0  # a dead unit
    run = train_with_dropout(model, x, y, 300, 0.05, tail=300)
    found = dropout_generalization(run, x, 100 * x)
    by_text = {a.text[:3]: a for a in found.assumptions}
    assert run.p_min == 0
    assert math.isinf(found.steady)
    assert by_text["eve"].held is False
    assert by_text["(a)"].held is (run.changed == 0)
    assert found.lemma4["λ_steady (heuristic)"].radius == 0
    assert found.lemma4["λ_steady (heuristic)"].vacuous
    with pytest.raises(InputError, match="delta"):
        dropout_generalization(run, x, x, delta=0.0)


def test_covering_numbers_of_known_sets() -> None:
    line = torch.linspace(0, 1, 1001, dtype=torch.float64)[:, None] @ torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    found = covering_number(line, 0.05)
    assert found.dimension == 1
    assert found.at_most == 10  # intervals of length 0.1
    assert 8 <= found.at_least <= 10
    assert covering_number(line, 1.0).at_least == covering_number(line, 1.0).at_most == 1
    assert covering_number(line[:1], 0.0).at_most == 1
    corners = torch.tensor(list(itertools.product((0.0, 1.0), repeat=3)))
    assert covering_number(corners, 0.4).at_least == 8
    square = torch.rand(3000, 2, generator=torch.Generator().manual_seed(0)).double()
    for radius in (0.05, 0.1, 0.3):
        found = covering_number(square, radius)
        assert found.at_least <= 1 / (math.pi * radius**2) * 3 + 4
        assert found.at_least <= found.at_most
    assert math.isinf(covering_number(square, 0.0).at_most)
    with pytest.raises(InputError, match="radius"):
        covering_number(square, -1.0)
    with pytest.raises(InputError, match="sample"):
        covering_number(square[:0], 1.0)
