import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from excite import InputError
from excite.probes import Moments


def by_definition(rows):
    """Eigenvalues of covariance and second moment, largest first."""
    rows = rows.double().numpy()
    centred = rows - rows.mean(0)
    return [np.linalg.eigvalsh(m.T @ m / len(rows))[::-1] for m in (centred, rows)]


@given(
    n=st.integers(1, 1500),
    d=st.integers(1, 40),
    cuts=st.lists(st.integers(1, 700), max_size=6),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_any_split_gives_the_eigenvalues_and_the_same_bits(n, d, cuts, seed):
    torch.manual_seed(seed)
    rows = torch.randn(n, d) * torch.rand(d) + 2
    whole, parts = Moments(d), Moments(d)
    whole.add(rows)
    rest = rows
    for cut in cuts:
        parts.add(rest[:cut])
        rest = rest[cut:]
    parts.add(rest)
    for truth, one, two in zip(
        by_definition(rows), (whole.covariance(), whole.second()), (parts.covariance(), parts.second())
    ):
        assert np.array_equal(one.values, two.values)
        assert one.slack == 0
        assert np.allclose(one.values, truth, rtol=1e-9, atol=1e-13 * truth[0])


def test_small_eigenvalues_survive_a_large_mean():
    torch.manual_seed(0)
    rows = torch.randn(3000, 20, dtype=torch.float64) * torch.logspace(0, -5, 20, dtype=torch.float64)
    moments = Moments(20)
    moments.add(rows + 1000)
    truth = np.linalg.eigvalsh(np.cov(rows.numpy().T, bias=True))[::-1]
    # The rows themselves are rounded to 1e-13; the formula E[hh'] − mean mean' would be off by 1e-10.
    assert np.allclose(moments.covariance().values, truth, rtol=1e-3, atol=1e-14)
    assert truth[-1] < 2e-10


def test_float32_rows_are_summed_in_float64():
    torch.manual_seed(0)
    rows = (torch.randn(2000, 5) * torch.tensor([1.0, 1.0, 1.0, 1.0, 1e-6])).float()
    moments = Moments(5)
    moments.add(rows)
    covariance = moments.covariance()
    assert np.allclose(covariance.values, by_definition(rows)[0], rtol=1e-9)
    assert float(covariance.rank) == 5


def test_rows_that_do_not_vary():
    for exact in (100, 1):
        moments = Moments(3, exact=exact, sketch=2)
        moments.add(torch.full((700, 3), 0.1))
        spectrum = moments.covariance()
        assert float(spectrum.effective_rank) == float(spectrum.rank) == float(spectrum.explained(1)) == 0
        assert float(moments.second().rank) == 1


def test_one_point_and_fewer_points_than_directions():
    torch.manual_seed(0)
    moments = Moments(30)
    moments.add(torch.randn(1, 30, dtype=torch.float64))
    assert float(moments.covariance().rank) == 0
    assert float(moments.second().rank) == 1
    moments.add(torch.randn(9, 30, dtype=torch.float64))
    assert float(moments.covariance().rank) == 9
    assert float(moments.second().rank) == 10
    assert float(moments.second().smallest) == 0


def test_refusals():
    with pytest.raises(InputError, match="at least one point"):
        Moments(3).covariance()
    with pytest.raises(InputError, match=r"expected rows of shape \(R, 3\)"):
        Moments(3).add(torch.zeros(2, 4))
    for n in (2, 600):
        with pytest.raises(InputError, match="finite"):
            moments = Moments(3)
            moments.add(torch.full((n, 3), float("nan")))
            moments.covariance()


def test_the_sampling_error_is_that_of_samples():
    """Over many samples the root mean square error of the eigenvalues stays below the stated one, and near it."""
    torch.manual_seed(0)
    rows = torch.randn(4000, 12, dtype=torch.float64).exp() * torch.linspace(1, 0.1, 12, dtype=torch.float64)
    everything = Moments(12)
    everything.add(rows)
    truth = everything.covariance().values
    assert everything.sampling_error(len(rows)) == 0
    errors, stated = [], []
    for _ in range(200):
        sample = Moments(12)
        sample.add(rows[torch.randperm(len(rows))[:1000]])
        errors.append(((sample.covariance().values - truth) ** 2).mean() / truth[0] ** 2)
        stated.append(sample.sampling_error(len(rows)) ** 2)
    ratio = (np.mean(errors) / np.mean(stated)) ** 0.5
    assert 0.3 < ratio < 1.1
