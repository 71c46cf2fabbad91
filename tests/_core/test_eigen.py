"""Eigenvectors, also where LAPACK's fast solver fails."""

from __future__ import annotations

import pytest
import torch

from excite._core.eigen import eigh


def matrices(dtype: torch.dtype) -> torch.Tensor:
    """Gram matrices (3, 8, 8): of full rank, of rank one, and with entries far below rounding."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 8, 8, generator=generator, dtype=torch.float64)
    rows[1, 1:] = 0
    rows[2, 2:] *= 1e-12
    return (rows @ rows.mT).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_torchs_where_that_converges(dtype) -> None:
    for ours, theirs in zip(eigh(matrices(dtype)), torch.linalg.eigh(matrices(dtype)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_it_fails_the_matrices_are_solved_again(dtype, monkeypatch) -> None:
    solve = torch.linalg.eigh
    solved = []

    def fails_once(matrix):
        solved.append(matrix)
        if len(solved) == 1:
            raise torch.linalg.LinAlgError("did not converge")
        return solve(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", fails_once)
    grams = matrices(dtype)
    values, vectors = eigh(grams)
    assert values.dtype == vectors.dtype == dtype
    rounding = (
        8 * torch.finfo(dtype).eps * values.abs().amax(-1)
    )  # eight entries per row, each up to eps / 8 of the largest, and the cast
    again = (vectors * values[:, None]) @ vectors.mT
    assert bool(((again - grams).abs().amax((-2, -1)) <= 4 * rounding).all())
    assert bool((solved[1][2][2:, 2:] == 0).all())  # what lay below rounding
