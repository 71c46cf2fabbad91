"""The number of conservation laws: Marcotte's counts, and that the known ones are all of them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import excite
from excite.bounds import count_laws


def linear(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths))).double()


def samples(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Head(nn.Module):
    """One head of attention of `width` channels, with a skip connection or without."""

    def __init__(self, width: int, skip: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(3, width, bias=False) for _ in range(3))
        self.o, self.skip = nn.Linear(width, 3, bias=False), skip
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out = self.o(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))
        return x + out if self.skip else out


@pytest.mark.parametrize(("inputs", "width", "outputs"), [(4, 1, 3), (4, 2, 3), (4, 3, 5), (2, 4, 3)])
def test_two_linear_layers(inputs, width, outputs):
    """r(r+1)/2 for U V', where the rank of the gradients leaves r²."""
    count = count_laws(linear(inputs, width, outputs), samples(12, inputs))
    assert count.laws == count.known == width * (width + 1) // 2
    assert count.complete
    if width <= min(inputs, outputs):
        assert count.parameters - count.rank == width**2
    assert count.gap > 1e6
    assert count.angle < 1e-12


def test_three_linear_layers():
    count = count_laws(linear(3, 2, 3, 3), samples(12, 3))
    assert count.laws == count.known == 3 + 6


@pytest.mark.parametrize("width", [1, 4])
def test_relu_layers(width):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width, bias=False), nn.ReLU(), nn.Linear(width, 2, bias=False)).double()
    count = count_laws(model, samples(60, 3))
    assert count.laws == count.known == width
    assert count.complete


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("width", [1, 2])
def test_one_attention_head(width, skip):
    """Queries against keys and values against outputs, r(r+1)/2 each; a skip connection adds none."""
    count = count_laws(Head(width, skip), samples(20, 3, 3))
    assert count.laws == count.known == width * (width + 1)
    assert count.complete


def test_translations_under_cross_entropy_only():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 3)).double()
    x = samples(60, 3)
    assert count_laws(model, x).laws == 4
    count = count_laws(model, x, loss="cross_entropy")
    assert count.laws == count.known == 4 + 5
    assert count.complete


def test_nothing_is_conserved_through_tanh():
    model = nn.Sequential(linear(3, 4), nn.Tanh(), linear(4, 2)).double()
    count = count_laws(model, samples(60, 3))
    assert (count.laws, count.known) == (0, 0)


def test_few_samples_are_told():
    count = count_laws(linear(4, 2, 3), samples(2, 4))
    assert not count.enough_data
    assert "more samples" in str(count)


@pytest.mark.slow
def test_five_hundred_parameters():
    count = count_laws(linear(20, 5, 80), samples(60, 20), limit=500)
    assert count.parameters == 500
    assert count.laws == count.known == 15


@pytest.mark.parametrize(
    ("change", "message"),
    [({"limit": 10}, "take a smaller one"), ({"loss": "mse"}, '"any" or "cross_entropy"'), ({"limit": 501}, "at most 500")],
)  # fmt: skip
def test_bad_input(change, message):
    with pytest.raises(excite.ExciteError, match=message):
        count_laws(linear(4, 2, 3), samples(12, 4), **change)


def test_float32_is_refused():
    with pytest.raises(excite.ExciteError, match="float64"):
        count_laws(linear(4, 2, 3).float(), samples(12, 4).float())
