"""Directions of several outputs: unit length, and a fallback where nothing moves."""

import torch

from excite.excitation.direction import any_direction, unit, wide


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
