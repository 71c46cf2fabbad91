from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from excite.probes import richness
from excite.probes.activation_rank.smallest import default_tolerance


def by_brute_force(rows, active, tolerance):
    """(points, rank, smallest, largest) of every unit, from all singular values of the rows that activate it."""
    found = []
    for unit in range(active.shape[1]):
        mine = rows[active[:, unit]].double()
        values = np.zeros(rows.shape[1])
        if len(mine):
            singular = torch.linalg.svdvals(mine).square().numpy()
            values[: len(singular)] = singular
        found.append((len(mine), int((values > tolerance * values[0]).sum()), values[-1], values[0]))
    return found


def agree(units, truth):
    assert units.points.tolist() == [points for points, *_ in truth]
    assert units.rank.tolist() == [rank for _, rank, *_ in truth]
    for value, error, largest, (_, _, smallest, top) in zip(units.smallest, units.error, units.largest, truth):
        assert abs(value - smallest) <= error * largest + 1e-13 * top
    deficient = [k for k, (_, rank, *_) in enumerate(truth) if rank < units.width]
    assert units.deficient == deficient
    assert units.silent == [k for k, (points, *_) in enumerate(truth) if not points]


@pytest.mark.slow
@given(
    n=st.integers(1, 60),
    widths=st.lists(st.integers(1, 12), min_size=2, max_size=3),
    bias=st.booleans(),
    double=st.booleans(),
    seed=st.integers(0, 9999),
)
@settings(max_examples=30)
def test_small_networks_against_brute_force(n, widths, bias, double, seed):
    torch.manual_seed(seed)
    sizes = [4, *widths]
    parts = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b, bias=bias), nn.ReLU())]
    model = nn.Sequential(*parts, nn.Linear(sizes[-1], 1)).to(torch.float64 if double else torch.float32)
    x = torch.randn(n, 4, dtype=model[0].weight.dtype)
    for tensor in (x, *model.parameters()):  # multiples of 1/8: no product or sum is rounded, in whatever order
        tensor.data.mul_(8).round_().div_(8)
    found = richness(model, x, units=True, batch=7)
    with torch.no_grad():
        h, live = x, model(x).squeeze(1) != 0
        for i in range(0, len(model), 2):
            z = model[i](h)
            truth = by_brute_force(h[live], (z > 0)[live], default_tolerance(h.shape[1], h.dtype))
            agree(found[str(i)].units, truth)
            h = z.relu()


@pytest.mark.parametrize("width", [100, 130])
def test_a_wide_layer_with_units_of_every_kind(width):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 40), nn.ReLU(), nn.Linear(40, 1))
    with torch.no_grad():
        model[0].bias[:10] = -100  # never active
        model[0].bias[10:20] = -1.2  # seldom
    x = torch.randn(900, width).relu()
    model[2].bias.data.fill_(0.3)
    found = richness(model, x, units=True)
    with torch.no_grad():
        truth = by_brute_force(x, model[0](x) > 0, default_tolerance(width, torch.float32))
    agree(found["0"].units, truth)
    assert found["0"].units.silent[:10] == list(range(10))
    assert len(set(found["0"].units.rank.tolist())) > 3
    assert found.deficient["0"] == found["0"].units.deficient
    assert f"never active: {len(found['0'].units.silent)}" in str(found)


def test_memory_only_changes_how_many_passes_there_are():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 7), nn.ReLU(), nn.Linear(7, 3))
    x = torch.randn(500, 300)
    passes = []

    class Loader:
        def __iter__(self):
            passes.append(1)
            return iter(x.split(100))

    few, many = (richness(model, Loader(), units=True, memory=m) for m in (100, 1))
    assert len(passes) == (1 + 1) + (1 + 7)  # for the spectra and then for units; a wide one takes 0.72 MB
    for one, two in zip(few, many):
        assert np.array_equal(one.units.smallest, two.units.smallest)
        assert np.array_equal(one.units.rank, two.units.rank)


def test_points_with_output_zero_do_not_count():
    """Theorem 1 sums over the points at which the output is not zero."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[2].weight.copy_(torch.tensor([[1.0, 0.0]]))
    x = torch.tensor([[1.0, 0.5], [1.0, -0.5], [0.0, 1.0]])  # the last one has output zero
    found = richness(model, x, units=True)["0"].units
    assert found.points.tolist() == [2, 1]
    assert found.deficient == [1]
    assert found.smallest[0] == pytest.approx(0.5)


def test_units_of_a_convolution_see_patches():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 36, 1)).double()
    x = torch.randn(8, 2, 6, 6, dtype=torch.float64)
    x[:, 1] = 2 * x[:, 0]
    found = richness(model, x, units=True, patches=None)["0"].units
    rows = torch.nn.functional.unfold(x, 3, padding=1).transpose(1, 2).reshape(-1, 18)
    with torch.no_grad():
        z = model[0](x).movedim(1, -1).reshape(-1, 5)
    agree(found, by_brute_force(rows, z > 0, default_tolerance(18)))
    assert found.rank.tolist() == [9] * 5


def test_units_of_a_grouped_convolution_see_their_group():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 9, 1)).double()
    x = torch.randn(8, 4, 3, 3, dtype=torch.float64)
    x[:, 3] = x[:, 2]
    found = richness(model, x, units=True, patches=None)["0"].units
    assert found.width == 2
    assert found.rank.tolist() == [2, 2, 2, 1, 1, 1]


def test_a_unit_in_doubt_is_decided_by_its_points_themselves():
    """1e-17 of the largest eigenvalue is lost in the sum of products, but not in the points."""
    torch.manual_seed(0)
    width = 80
    model = nn.Sequential(nn.Linear(width, 2), nn.ReLU(), nn.Linear(2, 1)).double()
    basis = torch.linalg.qr(torch.randn(300, width, dtype=torch.float64))[0]
    rotation = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64))[0]
    for ratio in (1 - 1e-5, 1 + 1e-5, 1 - 2e-5, 1 + 2e-5, 1 - 3e-5, 1 + 3e-5):
        tolerance = 1e-12
        scale = torch.ones(width, dtype=torch.float64)
        scale[-1] = (tolerance * ratio) ** 0.5
        x = basis * scale @ rotation
        with torch.no_grad():
            model[0].weight.zero_()
            model[0].bias.fill_(1.0)
            model[2].bias.fill_(5.0)
        units = richness(model, x, units=True, tolerance=tolerance)["0"].units
        assert units.excited.tolist() == [ratio > 1] * 2


def test_what_cannot_be_judged_says_why():
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(48, 1))
    found = richness(model, torch.randn(9, 2, 3, 3), units=True, exact=40)
    assert found["0"].units is None
    assert "not known" in found["0"].units_why
    assert "raise exact to 48" in found["3"].units_why
    assert "units not judged" in str(found)
