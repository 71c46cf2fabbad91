import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from excite.probes.base import StepContext
from excite.probes.layer_inputs import _places, layer_inputs
from models import build

CONVOLUTIONS = [
    nn.Conv2d(3, 4, 3),
    nn.Conv2d(3, 4, (2, 3), stride=(2, 1), padding=(1, 2), dilation=(2, 1)),
    nn.Conv2d(3, 4, 3, padding="same"),
    nn.Conv2d(3, 4, (4, 2), padding="same", dilation=(1, 3)),
    nn.Conv1d(3, 5, 3, stride=2, padding=1),
    nn.Conv3d(3, 2, 2, padding=1),
    nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
]


def look(model, x, patches=None, **options):
    """What the first affine call of a model sees."""
    signal = StepContext(model, 0, example=x).signals[0]
    with torch.no_grad():
        return layer_inputs(signal.call, signal.input, signal.call.run(signal.input), patches, **options)


def as_rows(output):
    return output.movedim(1, -1).reshape(-1, output.shape[1])


@pytest.mark.parametrize("conv", CONVOLUTIONS, ids=str)
def test_patches_times_the_weight_are_the_convolution(conv):
    conv = conv.double()
    x = torch.randn(2, 3, *[7, 6, 5][: conv.weight.dim() - 2], dtype=torch.float64)
    what = look(conv, x)
    expected = as_rows(conv(x))
    assert torch.allclose(what.rows @ conv.weight.flatten(1).T + conv.bias, expected)
    assert torch.equal(what.active, expected > 0)
    assert what.total == len(what.rows) == len(expected)
    assert torch.equal(what.sample_index, torch.arange(2).repeat_interleave(len(expected) // 2))


@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": (2, 1)}], ids=str)
def test_patches_are_those_of_torch_unfold(options):
    conv = nn.Conv2d(3, 4, (3, 2), **options).double()
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    expected = F.unfold(x, (3, 2), **options).transpose(1, 2).reshape(-1, 18)
    assert torch.equal(look(conv, x).rows, expected)


def test_sampled_patches_depend_on_the_image_alone():
    conv = nn.Conv2d(3, 4, 3).double()
    x = torch.randn(9, 3, 8, 8, dtype=torch.float64)
    every = look(conv, x)
    some = look(conv, x, 5, seed=3)
    assert some.rows.shape == (45, 27)
    assert (some.total, every.total) == (9 * 36, 9 * 36)
    for row, active, owner in zip(some.rows, some.active, some.sample_index):
        (at,) = torch.where((every.rows == row).all(1))
        assert torch.equal(every.active[at[0]], active)
        assert int(at[0]) // 36 == int(owner)
    parts = [look(conv, x[:4], 5, seed=3, first=0), look(conv, x[4:], 5, seed=3, first=4)]
    assert torch.equal(torch.cat([part.rows for part in parts]), some.rows)
    assert not torch.equal(look(conv, x, 5, seed=4).rows, some.rows)
    assert torch.equal(look(conv, x, 36).rows, every.rows)


@pytest.mark.parametrize(("places", "patches"), [(36, 5), (100, 4), (7, 3)])
def test_every_place_is_as_likely_as_another(places, patches):
    items = 20_000
    counts = np.bincount(_places(items, places, patches, 0, 1).reshape(-1), minlength=places)
    expected = items * patches / places
    assert abs(counts - expected).max() < 5 * expected**0.5


def test_whole_images():
    conv = nn.Conv2d(3, 4, 3).double()
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    assert torch.equal(look(conv, x, "whole").rows, x.flatten(1))


def test_an_image_without_a_batch_axis():
    conv = nn.Conv2d(3, 4, 3).double()
    x = torch.randn(3, 8, 8, dtype=torch.float64)
    assert torch.equal(look(conv, x).rows, look(conv, x[None]).rows)


def test_groups():
    conv = nn.Conv2d(4, 6, 3, groups=2).double()
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    what = look(conv, x)
    assert what.groups == 2
    for unit in range(6):
        columns = slice(18 * (unit // 3), 18 * (unit // 3) + 18)
        z = what.rows[:, columns] @ conv.weight[unit].flatten() + conv.bias[unit]
        assert torch.equal(z > 0, what.active[:, unit])


class Product(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(6, 1))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


PRODUCTS = {
    "x @ W'": lambda m, x: x @ m.weight.T,
    "W @ x'": lambda m, x: m.weight @ x.T,
    "addmm": lambda m, x: torch.addmm(m.bias, m.weight, x.T),
    "einsum": lambda m, x: torch.einsum("bi,oi->bo", x, m.weight),
    "einsum turned": lambda m, x: torch.einsum("oi, ib -> ob", m.weight, x.T.contiguous()),
    "vector": lambda m, x: m.weight @ x[0],
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_a_parameter_however_written(name):
    torch.manual_seed(0)
    model = Product(PRODUCTS[name]).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    what = look(model, x)
    assert torch.equal(what.rows, x[:1] if name == "vector" else x)
    bias = model.bias.T if name == "addmm" else 0.0
    assert torch.equal(what.rows @ model.weight.T + bias > 0, what.active)


def test_linear_rows_are_the_activations():
    model, x = build("mlp")
    signals = StepContext(model, 0, example=x).signals
    assert torch.equal(layer_inputs(signals[1].call, signals[1].input).rows, F.relu(model[0](x)))
