"""Sums over windows of steps."""

from __future__ import annotations

import math

import pytest
import torch

from excite.probes.bias_trajectory.windows import Sums

CPU = torch.device("cpu")


def numbers(found):
    return float(found["phi"]), float(found["tau"])


@pytest.mark.parametrize("errors", [[1.0, 2.0, 0.0], [0.0, 0.0, 0.0]])
def test_windows_are_the_same_in_numbers_and_in_tensors(errors):
    """Also without a sample that has a loss gradient: then there is no largest update."""
    plain, tensors = Sums(CPU), Sums(CPU)
    tensors._cpu = False
    tensors.total = tensors._nothing()
    tensors._window()
    for sums in (plain, tensors):
        sums.add(torch.tensor([3.0, 1.0, 2.0]), torch.tensor(errors))
    numbers, found = plain.read(), tensors.read()
    assert {k: float(v) for k, v in found.items()} == pytest.approx(numbers, nan_ok=True)
    assert math.isnan(numbers["max"]) == (not any(errors))
