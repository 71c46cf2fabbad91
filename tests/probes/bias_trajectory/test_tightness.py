"""How tight the stated errors are. `pytest -s tests/probes/bias_trajectory/test_tightness.py` prints them."""

import numpy as np
import pytest
import torch

from excite.probes import Moments, smallest_eigenvalue
from excite.probes.activation_rank.sketch import FrequentDirections


def show(what, ratios):
    print(f"{what}: stated over true error, median {np.median(ratios):.3g}, {min(ratios):.3g} to {max(ratios):.3g}")
    return ratios


@pytest.mark.slow
def test_the_slack_of_the_sketch():
    ratios = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        rows = rng.standard_normal((400, 50)) * np.geomspace(1, 10.0 ** -rng.uniform(0, 4), 50)
        sketch = FrequentDirections(50, 15)
        sketch.add(torch.from_numpy(rows))
        kept = sketch.rows.numpy()
        ratios.append(sketch.slack / np.linalg.eigvalsh(rows.T @ rows - kept.T @ kept)[-1])
    assert min(show("sketch", ratios)) >= 1 - 1e-9


def test_the_smallest_eigenvalue_and_its_lower_bound():
    """The value from Lanczos is nearly exact; what is stated is how much of it is proved."""
    ratios, true = [], []
    for seed in range(100):
        torch.manual_seed(seed)
        rows = torch.randn(400, 100, dtype=torch.float64).relu() * torch.logspace(
            0, -seed / 50, 100, dtype=torch.float64
        )
        matrix = rows.T @ rows
        truth = torch.linalg.eigvalsh(matrix)
        found = smallest_eigenvalue(matrix, 1e-9)
        ratios.append(float(truth[0]) / (found.value - found.error * found.largest))
        true.append(abs(found.value - float(truth[0])) / float(truth[-1]))
    print(f"smallest eigenvalue: error over the largest eigenvalue at most {max(true):.1e}")
    print(f"its lower bound: truth over bound, median {np.median(ratios):.4f}, {min(ratios):.4f} to {max(ratios):.4f}")
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.15


@pytest.mark.slow
def test_the_sampling_error():
    ratios = []
    for seed in range(100):
        torch.manual_seed(seed)
        rows = torch.randn(3000, 20, dtype=torch.float64).exp() * torch.logspace(0, -seed / 50, 20, dtype=torch.float64)
        every, some = Moments(20), Moments(20)
        every.add(rows)
        some.add(rows[torch.randperm(3000)[:600]])
        truth = every.covariance().values
        error = np.sqrt(((some.covariance().values - truth) ** 2).mean()) / truth[0]
        ratios.append(some.sampling_error(3000) / error)
    assert np.median(show("sampling", ratios)) >= 1  # an expectation: single samples may be worse
