"""Sums over blocks of rows, and norms of many tensors."""

import pytest
import torch

from excite.probes.flight_recorder.norms import LARGE, SampledTensors, norms, sample_blocks


def test_small_tensors_are_taken_as_they_are():
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(3, 4).double(),
        "b": torch.randn(5000).double(),
        "c": torch.tensor(2.0).double(),
        "transposed": torch.randn(6, 5).double().T,
        "every other": torch.randn(8, 4).double()[::2],
        "none": torch.zeros(0).double(),
    }
    sampled = SampledTensors(tensors)
    for order in (1, 2):
        expected = [float(one.abs().pow(order).sum()) for one in tensors.values()]
        assert sampled.sums(sampled.read(), order).tolist() == pytest.approx(expected, rel=1e-12)
    assert sampled.same(list(tensors.values()))
    assert not sampled.same([one.clone() for one in tensors.values()])
    tensors["a"].mul_(2)
    assert float(sampled.sums(sampled.read(), 1)[0]) == pytest.approx(float(tensors["a"].abs().sum()), rel=1e-12)


def test_memory_that_is_replaced_is_read_again():
    weight = torch.nn.Parameter(torch.ones(300, 300))
    sampled = SampledTensors({"weight": weight})
    weight.data = torch.full((300, 300), 2.0)
    assert float(sampled.sums(sampled.read(), 1)) == pytest.approx(2 * 90_000)


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_blocks_of_a_large_tensor_estimate_its_norm(layout):
    torch.manual_seed(0)
    x = torch.randn(1024, 256) * torch.linspace(0.5, 2, 1024)[:, None]
    x = x if layout == "rows" else x.T
    views, factor = sample_blocks(x)
    assert x.numel() > LARGE
    assert [view.numel() for view in views] == [4096] * 8
    assert factor == pytest.approx(8)
    sampled = SampledTensors({"x": x})
    assert float(sampled.sums(sampled.read(), 2)) == pytest.approx(float(x.square().sum()), rel=0.05)


def test_norms_of_several_dtypes():
    tensors = [torch.full((3,), 2.0, dtype=torch.bfloat16), torch.full((4,), 3.0).double()]
    assert norms(tensors, 2).tolist() == pytest.approx([12**0.5, 6.0], rel=1e-6)
    assert norms([], 2).shape == (0,)
