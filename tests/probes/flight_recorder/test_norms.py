"""Sums over blocks of rows, and norms of many tensors."""

import pytest
import torch

from excite.probes.flight_recorder.norms import LARGE, SampledTensors, norms, sample_blocks


def test_small_tensors_are_taken_as_they_are():
    tensors = {"a": torch.randn(3, 4).double(), "b": torch.randn(5).double(), "c": torch.tensor(2.0).double()}
    sampled = SampledTensors(tensors)
    expected = [float(one.square().sum()) for one in tensors.values()]
    assert sampled.sums(sampled.views, 2).tolist() == pytest.approx(expected, rel=1e-12)
    assert sampled.sums(sampled.views, 1).tolist() == pytest.approx(
        [float(t.abs().sum()) for t in tensors.values()], rel=1e-12
    )
    assert sampled.same(list(tensors.values()))
    assert not sampled.same([one.clone() for one in tensors.values()])


def test_an_eighth_of_a_large_tensor_estimates_its_norm():
    torch.manual_seed(0)
    x = torch.randn(1024, 256) * torch.linspace(0.5, 2, 1024)[:, None]
    views, factor = sample_blocks(x)
    assert x.numel() > LARGE
    assert sum(view.numel() for view in views) == x.numel() // 8
    assert factor == pytest.approx(8)
    sampled = SampledTensors({"x": x})
    assert float(sampled.sums(sampled.views, 2)) == pytest.approx(float(x.square().sum()), rel=0.05)


def test_norms_of_several_dtypes():
    tensors = [torch.full((3,), 2.0, dtype=torch.bfloat16), torch.full((4,), 3.0).double()]
    assert norms(tensors, 2).tolist() == pytest.approx([12**0.5, 6.0], rel=1e-6)
    assert norms([], 2).shape == (0,)
