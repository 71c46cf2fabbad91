import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from excite import InputError
from excite.probes import Rank, effective_rank
from excite.probes.protocol import Moment
from excite.probes.rank import seen_by
from models import CASES, build, same_state, state_of


def by_definition(rows):
    values = torch.linalg.svdvals(rows - rows.mean(0)).square()
    shares = [float(v) for v in values / values.sum() if v > 0]
    return math.exp(-sum(s * math.log(s) for s in shares))


@given(n=st.integers(3, 30), d=st.integers(1, 30), scale=st.sampled_from([1e-8, 1.0, 1e8]), seed=st.integers(0, 99))
@settings(deadline=None)
def test_effective_rank_is_its_definition_and_ignores_scale_shift_and_rotation(n, d, scale, seed):
    torch.manual_seed(seed)
    rows = torch.randn(n, d, dtype=torch.float64) * torch.rand(d, dtype=torch.float64)
    rank = effective_rank(rows)
    assert rank == pytest.approx(by_definition(rows), rel=1e-9)
    assert 1 - 1e-9 <= rank <= min(n - 1, d) + 1e-9
    rotation = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))[0]
    assert effective_rank(scale * (rows @ rotation + 3)) == pytest.approx(rank, rel=1e-6)


def test_effective_rank_at_its_ends():
    assert effective_rank(torch.full((5, 3), 0.1)) == 0
    assert effective_rank(torch.zeros(5, 3)) == 0
    line = torch.randn(50, 1, dtype=torch.float64) * torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)
    assert effective_rank(line) == pytest.approx(1)
    even = torch.cat([torch.eye(4), -torch.eye(4)]).double()
    assert effective_rank(even) == pytest.approx(4)
    for bad in (torch.zeros(3), torch.full((3, 3), math.nan)):
        with pytest.raises(InputError):
            effective_rank(bad)


CONVOLUTIONS = [
    nn.Conv2d(3, 4, 3),
    nn.Conv2d(3, 4, (2, 3), stride=(2, 1), padding=(1, 2), dilation=(2, 1)),
    nn.Conv2d(3, 4, 3, padding="same"),
    nn.Conv2d(3, 4, (4, 2), padding="same", dilation=(1, 3)),
    nn.Conv1d(3, 5, 3, stride=2, padding=1),
    nn.Conv3d(3, 2, 2, padding=1),
]


@pytest.mark.parametrize("conv", CONVOLUTIONS, ids=str)
def test_patches_times_the_weight_are_the_convolution(conv):
    conv = conv.double()
    x = torch.randn(2, 3, *[7, 6, 5][: conv.weight.dim() - 2], dtype=torch.float64)
    (signal,) = Moment(conv, 0, example=x).signals
    rows = seen_by(signal, 10**6)
    expected = (conv(x) - conv.bias.reshape(1, -1, *[1] * (x.dim() - 2))).movedim(1, -1).reshape(-1, conv.out_channels)
    assert torch.allclose(rows @ conv.weight.flatten(1).T, expected)
    assert len(seen_by(signal, 5)) <= 5


@pytest.mark.parametrize("name", CASES)
def test_every_layer_of_every_model_has_a_rank(name):
    model, x = build(name, batch=6)
    model.train()
    before = state_of(model)
    values = Rank().measure(Moment(model, 0, example=x))
    assert same_state(before, state_of(model))
    assert len(values) == 2 * CASES[name].layers
    assert all(v >= 0 and math.isfinite(v) for v in values.values())
    assert all(v <= 1 + 1e-9 for k, v in values.items() if k.startswith("share"))


def test_linear_rows_are_the_activations():
    model, x = build("mlp")
    signals = Moment(model, 0, example=x).signals
    assert torch.equal(seen_by(signals[1], 100), F.relu(model[0](x)))
