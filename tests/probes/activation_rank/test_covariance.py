"""Sums of outer products in place, and spectra of several covariances against numpy's eigenvalues."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from excite import InputError
from excite.probes.activation_rank.covariance import Covariances, add_outer, home, symmetric


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


def test_spectra_equal_those_of_the_written_out_matrices() -> None:
    """More rows than columns, fewer, and a single row, whose covariance is zero."""
    generator = torch.Generator().manual_seed(0)
    sets = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((9, 4), (3, 7), (1, 5))]
    for rows, found in zip(sets, Covariances(sets).spectra(), strict=True):
        expected = np.linalg.eigvalsh(np.cov(rows.numpy().T, bias=True)) if len(rows) > 1 else np.zeros(rows.shape[1])
        assert found.values == pytest.approx(expected[::-1].clip(min=0), abs=1e-14)
        assert found.total == pytest.approx(float(rows.var(0, correction=0).sum()))


@pytest.mark.parametrize("shape", [(4, 9, 5), (3, 5, 9), (1, 2, 2)])
def test_stacks_are_several_matrices(shape: tuple[int, int, int]) -> None:
    rows = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alone = [one.values for one in Covariances(list(rows)).spectra()]
    found = Covariances([rows[0], rows]).spectra()
    assert len(found) == shape[0] + 1
    for one, expected in zip(found, [alone[0], *alone], strict=True):
        assert one.values == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize(("value", "message"), [(float("nan"), "finite activations"), (1e200, "squares are finite")])
def test_rows_without_a_finite_covariance_are_refused(value: float, message: str) -> None:
    rows = torch.tensor([[0.0, 1.0], [value, 2.0]], dtype=torch.float64)
    with pytest.raises(InputError, match=message):
        Covariances([rows]).spectra()
