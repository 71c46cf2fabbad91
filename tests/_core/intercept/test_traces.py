"""What is remembered of a pass is about one tensor, and no longer valid once that was written to."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from excite._core.intercept.traces import (
    DivisionByWeight,
    MixedSignal,
    SignalTrace,
    WeightedSum,
    input_step,
    rounded,
    version,
)


def test_a_trace_ends_with_a_write() -> None:
    signal = torch.ones(2, 3)
    result = signal.T
    step = input_step(Tensor.t, (signal,), {}, (0,), result)
    trace = SignalTrace(weakref.ref(result), signal, (version(result), version(signal)), step)
    assert trace.of(result)
    assert not trace.of(signal)
    signal.add_(1)
    assert not trace.of(result)


def test_an_input_step_forgets_the_number_of_samples() -> None:
    step = input_step(Tensor.view, (torch.zeros(6, 4), 6, 2, 2), {}, (0,), torch.zeros(6, 2, 2))
    assert step(torch.zeros(5, 4)).shape == (5, 2, 2)
    cast = input_step(Tensor.to, (torch.zeros(2), torch.float64), {}, (0,), torch.zeros(2, dtype=torch.float64))
    assert cast(torch.zeros(3)).dtype == torch.float64


def test_products_written_in_other_ways() -> None:
    x, w = torch.randn(5, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    total = WeightedSum(torch.mul, torch.sum, (-1,), {})
    torch.testing.assert_close(total(x, w), x @ w)
    division = DivisionByWeight(w)
    assert torch.equal(division(x, division.reciprocal), x / w)
    torch.testing.assert_close(division(x, 1 / w), x / w)
    assert rounded(torch.mul, torch.float32)(x, w).dtype == torch.float32


def test_a_bias_for_every_head_is_no_weight() -> None:
    matrix = MixedSignal(weakref.ref(torch.zeros(1)), (), True)
    assert matrix.weighs("ok", "bk", "bo")  # varies along the sum and along an axis of its own
    assert not matrix.weighs("bk", "bk", "b")
    bias = MixedSignal(weakref.ref(torch.zeros(1)), (), True, varies=(True, False))
    assert not bias.weighs("hk", "bhk", "bh")
