"""The path kernel against all paths, written out; Theorem 2 through convolutions, pooling and skips against the explicit program."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

from excite.bounds import empty_region
from excite.bounds.trajectory.path_kernel import PathKernel
from excite.bounds.trajectory.regions import _through_paths
from excite.errors import ModelError
from excite.lipschitz import local
from excite.wiring.piecewise import PiecewiseLinear, piecewise_linear


class Skip(nn.Module):
    """A convolution, another one beside a skip, average pooling, a linear layer."""

    def __init__(self, channels: int = 2) -> None:
        super().__init__()
        self.first, self.inner = nn.Conv1d(1, channels, 2), nn.Conv1d(channels, channels, 1)
        self.pool, self.last = nn.AvgPool1d(2), nn.Linear(channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.last(self.pool(x + self.inner(x).relu()).flatten(1))


def network(seed: int) -> Skip:
    torch.manual_seed(seed)
    return Skip().double()


def points(count: int, seed: int) -> Tensor:
    return torch.randn(count, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def written_out(net: PiecewiseLinear, x: Tensor) -> np.ndarray:
    """s(x) for every path from an input to the output, (N, paths): 1 where all units of the path are active."""
    graph = net.graph()
    gates = net.signals(x)[1]
    rows = []
    for path in graph.paths(10_000):
        if path[0] != "1":
            units = [tuple(map(int, name.split("."))) for name in path[1:-1]]
            rows.append(
                torch.stack([gates[stage][:, unit] for stage, unit in units]).prod(0) if units else torch.ones(len(x))
            )
        assert all(edge in graph.weights for edge in pairwise(path))
    return torch.stack(rows, 1).numpy()


@pytest.mark.parametrize("seed", range(3))
def test_inner_products_count_common_active_paths(seed: int) -> None:
    model = network(seed)
    x, new = points(12, 1), points(9, 2)
    net = piecewise_linear(model, x)
    kernel = PathKernel(net)
    left, right = ([gate.bool().numpy() for gate in net.signals(p)[1][1:-1]] for p in (x, new))
    slow, other = written_out(net, x), written_out(net, new)
    p = 67108859
    np.testing.assert_array_equal(kernel.inner(left, right, p), slow @ other.T)
    np.testing.assert_array_equal(kernel.squares(left, p), (slow**2).sum(1))
    np.testing.assert_array_equal(kernel.alive(left), slow.any(1))
    np.testing.assert_array_equal(kernel.inner(left, right, 3), (slow @ other.T) % 3)


@pytest.mark.parametrize("seed", range(4))
def test_bounds_are_those_of_the_explicit_program(seed: int) -> None:
    model = network(seed)
    x, new = points(25, 3), points(60, 4)
    found = empty_region(model, x, None, new)
    net = piecewise_linear(model, x)
    columns, sides = written_out(net, x).T, written_out(net, new).T
    cost = local(model, x).numpy()
    for at, side in enumerate(sides.T):
        program = linprog(np.concatenate([cost, cost]), A_eq=np.hstack([columns, -columns]), b_eq=side)
        assert bool(found.reached[at]) == (program.status == 0)
        if program.status == 0:
            assert float(found.values[at]) == pytest.approx(program.fun, rel=1e-7, abs=1e-9)
    assert (local(model, new) <= found.values * (1 + 1e-9) + 1e-15).all()
    assert 0.05 < found.share < 1
    assert float(found.reached[found.empty].double().sum()) > 0


def test_a_fully_connected_network_has_the_same_bounds() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    x, new = (torch.randn(n, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (30, 80))
    expected = empty_region(plain, x, local(plain, x), new, beta=1.0)
    found = _through_paths(plain, x, None, new, None, None, 1000)
    assert torch.equal(found.reached, expected.reached)
    torch.testing.assert_close(found.values, expected.values, rtol=1e-9, atol=0)


def test_leaky_units_and_several_outputs_are_refused() -> None:
    x = torch.randn(3, 1, 4)
    leaky = nn.Sequential(nn.Conv1d(1, 2, 2), nn.LeakyReLU(), nn.Flatten(), nn.Linear(6, 1))
    with pytest.raises(ModelError, match="slopes 0 and 1"):
        empty_region(leaky, x, None, x)
    two = nn.Sequential(nn.Conv1d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(6, 2))
    with pytest.raises(ModelError, match="one output"):
        empty_region(two, x, None, x)
