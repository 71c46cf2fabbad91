"""Exact margins by mixed-integer programs, against brute force, and the search against them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.exact_margins import EXACT, Comparison, compare, random_net, stored
from torch import nn

from excite.errors import InputError, ModelError
from excite.margin import SearchOptions, margins
from excite.margin.certificates.exact import Program


@pytest.mark.parametrize("norm", ["inf", "1"])
def test_exact_margin_of_a_net_in_the_plane(norm: str) -> None:
    model, x, y, how = random_net(20)  # two inputs: a fine grid is the truth
    found = margins(model, x, y, norm=norm, **how, options=EXACT)
    axis = torch.linspace(-1, 1, 801)
    grid = torch.cartesian_prod(axis, axis)
    f = model(grid).detach()
    decided = (f[:, 0] > how["threshold"]).long() if f.shape[1] == 1 else f.argmax(1)
    for i in range(len(x)):
        other = grid[decided != y[i]]
        distance = torch.linalg.vector_norm(other - x[i], float(norm), dim=1)
        truth = float(distance.min()) if len(other) else float("inf")
        assert float(found.lower[i]) <= truth * (1 + 1e-6)
        assert float(found.values[i]) == pytest.approx(truth, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "norm"), [(5, "inf"), (10, "1")])
def test_search_meets_the_exact_values(seed: int, norm: str) -> None:
    found = compare(seed, norm)
    assert (found.below, found.above) == (0, 0)
    assert found.near >= 2


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["inf", "1"])
def test_search_meets_the_exact_values_of_200_nets(norm: str) -> None:
    """The table of `python -m benchmarks.exact_margins`."""
    found = sum((compare(seed, norm) for seed in range(1000, 1200)), Comparison())
    assert found.met, found


def test_stored_comparisons_are_not_computed_again(tmp_path: Path) -> None:
    first = stored(5, "inf", tmp_path)
    path = tmp_path / "inf" / "5.json"
    path.write_text(path.read_text().replace('"near": 3', '"near": 2'))
    assert (first.near, stored(5, "inf", tmp_path).near) == (3, 2)


def test_a_program_is_solved() -> None:
    # the cheapest of 3 a + 2 b with a + b ≥ 3/2, b ≤ 1 a whole number: a = 1/2, b = 1
    program = Program()
    a, b = program.variables([0.0], [10.0])[0], program.variables([0.0], [1.0], binary=True)[0]
    program.row([a, b], [1.0, 1.0], 1.5, np.inf)
    bound, solution = program.solve(np.array([3.0, 2.0]), 10, (np.zeros(2), 0.0))
    assert bound == pytest.approx(3.5)
    assert solution == pytest.approx([0.5, 1.0])
    assert program.solve(np.array([3.0, 2.0]), 10, (np.ones(2), 1.0))[1] is None


def test_a_linear_model_has_its_distance() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(5, 1).double(), torch.randn(4, 5, dtype=torch.float64)
    y = (model(x)[:, 0] > 0.5).long()
    for norm, dual in (("inf", 1), ("1", float("inf"))):
        truth = (model(x)[:, 0] - 0.5).abs() / torch.linalg.vector_norm(model.weight[0], dual)
        found = margins(model, x, y, norm=norm, options=EXACT)
        torch.testing.assert_close(found.lower, truth.detach(), rtol=1e-4, atol=1e-6)


def test_nothing_within_the_bounds_is_said() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(0.1)
    found = margins(model, torch.zeros(1, 2), torch.tensor([0]), threshold=5, bounds=(-1, 1), options=EXACT)
    assert found.values[0] == found.lower[0] == float("inf")


def test_what_has_no_program_is_refused_by_name() -> None:
    x, y = torch.randn(2, 4), torch.zeros(2)
    smooth = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    with pytest.raises(ModelError, match="tanh"):
        margins(smooth, x, y, threshold=9, options=EXACT)
    with pytest.raises(InputError, match="'inf' and '1'"):
        margins(nn.Linear(4, 1), x, y, norm="2", threshold=9, options=EXACT)
    wide = nn.Sequential(nn.Linear(4, 6000), nn.ReLU(), nn.Linear(6000, 1))
    with pytest.raises(ModelError, match="6000"):
        margins(wide, x, y, threshold=9, options=SearchOptions(steps=2, restarts=1, evidence=False, certify="exact"))


def test_every_activation_with_kinks_has_a_program() -> None:
    torch.manual_seed(1)
    for bend, norm in itertools.product((nn.Hardtanh(), nn.LeakyReLU(0.2), nn.Hardsigmoid()), ("inf",)):
        model = nn.Sequential(nn.Linear(2, 4), bend, nn.Linear(4, 1))
        x = torch.zeros(1, 2)
        y = (model(x)[:, 0] > 0.5).long()
        found = margins(model, x, y, norm=norm, bounds=(-8, 8), options=EXACT)
        if torch.isfinite(found.values[0]):
            assert float(found.lower[0]) == pytest.approx(float(found.values[0]), rel=0.01)
