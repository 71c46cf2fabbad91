"""Several networks of one architecture as one module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excite.errors import ModelError
from excite.train.vectorized.stacked_modules import (
    StackedLayers,
    check_stack,
    side_by_side,
    stack_batches,
    stack_models,
)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "shape", "why"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), (4,), "random numbers"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (4,), "buffers"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), (4,), "cannot be trained together"),
        (Transposed, (3, 4), "."),
    ],
)
def test_what_cannot_be_stacked_is_refused(make: Any, shape: tuple[int, ...], why: str) -> None:
    models = [make() for _ in range(3)]
    before = torch.get_rng_state()
    with pytest.raises(ModelError, match=why):
        check_stack(stack_models(models), models, torch.randn(5, *shape, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Conv1d(4, 6, 3, groups=2, padding="same", dtype=torch.float64), (4, 9)),
        (lambda: nn.Conv2d(2, 3, (3, 2), stride=2, dilation=2, bias=False, dtype=torch.float64), (2, 9, 8)),
        (lambda: nn.Conv3d(1, 2, 2, padding=1, dtype=torch.float64), (1, 4, 4, 4)),
        (lambda: nn.Linear(4, 3, dtype=torch.float64), (5, 6, 4)),
        (lambda: nn.Linear(4, 3, bias=False, dtype=torch.float64), (4,)),
    ],
)
def test_stacked_layers_in_float64(make: Any, shape: tuple[int, ...]) -> None:
    models = [make() for _ in range(4)]
    batches = [torch.randn(5, *shape, dtype=torch.float64) for _ in range(4)]
    expected = stack_batches([model(x) for model, x in zip(models, batches)])
    stacked = stack_models(models)
    with StackedLayers():
        torch.testing.assert_close(stacked(stack_batches(batches)), expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():  # the networks move with the stack
        stacked.weight += 1  # type: ignore[operator]
    assert all(torch.equal(model.weight, stacked.weight[i]) for i, model in enumerate(models))  # type: ignore[index]


def test_stacked_weights_are_a_grouped_convolution_in_float64() -> None:
    weight = torch.randn(3, 4, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    x = torch.randn(6, 6, 9, 9, dtype=torch.float64)
    dense, grouped = F.conv2d(x, side_by_side(weight)), F.conv2d(x, weight.flatten(0, 1), groups=3)
    torch.testing.assert_close(dense, grouped, rtol=1e-12, atol=1e-12)
    slopes = [torch.autograd.grad(out.square().sum(), weight)[0] for out in (dense, grouped)]
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_stacked_convolutions_on_a_gpu_in_float64() -> None:
    models = [nn.Conv2d(2, 3, 3, stride=2, padding=1, dtype=torch.float64, device="cuda") for _ in range(4)]
    batches = [torch.randn(5, 2, 9, 9, dtype=torch.float64, device="cuda") for _ in range(4)]
    expected = stack_batches([model(x) for model, x in zip(models, batches)])
    with StackedLayers():
        torch.testing.assert_close(stack_models(models)(stack_batches(batches)), expected, rtol=1e-12, atol=1e-12)
