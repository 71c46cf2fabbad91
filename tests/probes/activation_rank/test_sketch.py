import math

import numpy as np
import pytest
import torch

from excite.probes.activation_rank.moments import Moments
from excite.probes.activation_rank.sketch import FrequentDirections


def matrix(seed):
    """Rows of random numbers, widths and decay."""
    rng = np.random.default_rng(seed)
    n, d = int(rng.integers(20, 400)), int(rng.integers(5, 60))
    rows = rng.standard_normal((n, d)) * np.geomspace(1, 10.0 ** -rng.uniform(0, 6), d)
    if seed % 3 == 0:
        rows = np.sort(rows, axis=0)  # an order that is bad for a stream
    return torch.from_numpy(rows), int(rng.integers(2, 30))


@pytest.mark.parametrize("seed", range(100))
def test_the_error_of_the_sketch_is_within_its_bound(seed):
    rows, size = matrix(seed)
    sketch = FrequentDirections(rows.shape[1], size)
    for part in rows.split(17):
        sketch.add(part)
    truth, kept = rows.T @ rows, sketch.rows.T @ sketch.rows
    rounding = 1e-12 * float(truth.trace())
    error = torch.linalg.eigvalsh(truth - kept)
    assert float(error[0]) >= -rounding
    assert float(error[-1]) <= sketch.slack + rounding
    assert sketch.total == pytest.approx(float(truth.trace()))
    # The a priori bound, for every k.
    tails = torch.linalg.svdvals(rows).square().flip(0).cumsum(0).flip(0).tolist() + [0.0] * 60
    for k in range(min(size, rows.shape[1]) + 1):
        assert sketch.slack <= tails[k] / (size + 1 - k) + rounding


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_every_quantity_of_a_sketched_covariance_is_in_its_range(seed):
    rows, size = matrix(1000 + seed)
    exact, rough = Moments(rows.shape[1]), Moments(rows.shape[1], exact=1, sketch=size)
    for one in (exact, rough):
        one.add(rows + 3)
    for truth, found in ((exact.covariance(1e-9), rough.covariance(1e-9)), (exact.second(1e-9), rough.second(1e-9))):
        little = 1e-9 * truth.total
        assert found.total == pytest.approx(truth.total)
        assert (truth.values >= found.values - little).all()
        assert (truth.values <= found.values + found.slack + little).all()
        for quantity in ("effective_rank", "participation_ratio", "rank", "largest", "smallest"):
            true, between = float(getattr(truth, quantity)), getattr(found, quantity)
            assert between.low * (1 - 1e-6) - little <= true <= between.high * (1 + 1e-6) + little, quantity
        for k in range(truth.width + 1):
            true, between = float(truth.explained(k)), found.explained(k)
            assert between.low - 1e-9 <= true <= between.high + 1e-9


def test_few_rows_are_kept_exactly():
    rows = torch.randn(30, 50, dtype=torch.float64)
    sketch = FrequentDirections(50, 20)
    sketch.add(rows)
    assert sketch.slack == 0
    assert torch.equal(sketch.rows, rows)


def test_memory_does_not_grow_with_the_data():
    sketch = FrequentDirections(50, 8)
    for _ in range(50):
        sketch.add(torch.randn(100, 50, dtype=torch.float64))
        assert len(sketch.rows) <= 16
    assert math.isfinite(sketch.slack)
