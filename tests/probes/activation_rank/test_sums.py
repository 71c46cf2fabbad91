"""Sums of outer products in place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from excite.probes.activation_rank.sums import add_outer, home, symmetric


def test_sums_equal_the_product_of_all_rows() -> None:
    rows = torch.randn(11, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = torch.zeros(5, 5, dtype=torch.float64)
    for part in (rows[:4], rows[4:5], rows[5:]):
        add_outer(total, part)
    found = symmetric(total)
    assert found == pytest.approx((rows.T @ rows).numpy())
    assert np.array_equal(found, found.T)


def test_devices_without_float64_sum_on_the_cpu() -> None:
    assert home(torch.device("mps")) == torch.device("cpu")
    assert home(torch.device("cuda", 1)) == torch.device("cuda", 1)
