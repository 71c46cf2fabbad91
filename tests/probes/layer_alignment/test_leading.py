"""Leading singular values and vectors against numpy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from excite.errors import ModelError
from excite.probes.layer_alignment import leading as leading_module
from excite.probes.layer_alignment.leading import leading, shifted_cholesky
from probes.layer_alignment.references import svd


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 10**6), st.floats(1e-3, 1e3))
def test_all_of_a_small_matrix(m: int, n: int, seed: int, scale: float) -> None:
    w = scale * torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u, s, _ = svd(w)
    found = leading(w, exact=100)
    np.testing.assert_allclose(found.squares[: len(s)], s**2, rtol=0, atol=1e-10 * s[0] ** 2)
    assert float(found.total) == pytest.approx(float((s**2).sum()), rel=1e-12)
    if len(s) == 1 or s[0] - s[1] > 1e-3 * s[0]:
        assert abs(float(found.left @ torch.from_numpy(u[:, 0]))) == pytest.approx(1, abs=1e-8)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((60, 90), torch.float64), ((90, 60), torch.float64), ((64, 80), torch.float32)]
)
def test_subspace_iteration_from_a_warm_start(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Weights that move a little: a few iterations each follow the leading singular vectors."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(shape, generator=g, dtype=torch.float64)
    w += 15 * torch.outer(
        *(nn.functional.normalize(torch.randn(k, generator=g, dtype=torch.float64), dim=0) for k in shape)
    )
    basis = None
    for _ in range(20):
        w = w + 0.02 * torch.randn(shape, generator=g, dtype=torch.float64)
        found = leading(w.to(dtype), exact=8, basis=basis)
        basis = found.basis
        assert not found.complete
    u, s, _ = svd(w)
    # The error of a Ritz value is of the order of the residual squared.
    precise = max(10 * float(found.residual) ** 2, 1e-5 if dtype == torch.float32 else 0.0)
    assert float(found.squares[0]) == pytest.approx(s[0] ** 2, rel=precise)
    assert float(found.residual) < 1e-3
    assert float(found.squares[0]) <= s[0] ** 2 * (1 + 1e-6)
    assert float(found.total) == pytest.approx(float((s**2).sum()), rel=1e-6)
    assert float(found.fourth) == pytest.approx(float((s**4).sum()), rel=1e-5)  # type: ignore[arg-type]
    assert abs(float(found.left.double() @ torch.from_numpy(u[:, 0]))) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_direction_that_comes_to_lead_is_found_next_time(dtype: torch.dtype) -> None:
    """Orthogonal to all that a search would start from: training makes such directions out of a flat spectrum."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(200, 300, generator=g, dtype=torch.float64)
    u, s, v = svd(w)
    basis = torch.from_numpy(u[:, :8].copy())
    w = w + (1.15 * s[0] - s[20]) * torch.from_numpy(np.outer(u[:, 20], v[20]))
    u, s, _ = svd(w)
    assert abs(float(basis[:, 0] @ torch.from_numpy(u[:, 0]))) < 1e-9
    for _ in range(2):
        found = leading(w.to(dtype), exact=8, basis=basis)
        basis = found.basis
    assert float(found.squares[0]) == pytest.approx(s[0] ** 2, rel=1e-3)
    assert abs(float(found.left.double() @ torch.from_numpy(u[:, 0]))) > 0.98


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("small", [9, 40, 200])
@pytest.mark.parametrize("steep", [0.0, 1e3])
def test_orthonormal_columns_by_cholesky_factors_as_by_qr(small: int, steep: float, dtype: torch.dtype) -> None:
    """Powers of a matrix on a vector are nearly dependent, or more than there are dimensions."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(2, small, 2 * small, generator=g, dtype=torch.float64)
    w[:, 0] *= 1 + steep
    gram = (w @ w.mT).to(dtype)
    gram *= small**0.5 / gram.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
    columns = [torch.randn(2, small, 3, generator=g, dtype=torch.float64).to(dtype)]
    for _ in range(7):
        columns.append(gram @ columns[-1])
    krylov = torch.cat(columns, 2)
    found = []
    for space in (torch.linalg.qr(krylov)[0], shifted_cholesky(krylov)):
        assert float(torch.linalg.matrix_norm(space, 2).max()) < 1 + 1e-5
        found.append(torch.linalg.eigvalsh(space.double().mT @ gram.double() @ space.double())[:, -2:])
    assert bool(
        ((found[0] - found[1]).abs() <= 1e-5 * found[0][:, -1:]).all()
    )  # what rounding leaves is relative to the first
    truth = torch.linalg.eigvalsh(gram.double())[:, -2:]
    assert bool((found[1] <= truth * (1 + 1e-5)).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("orthonormal", [leading_module._orthonormal, shifted_cholesky])
def test_degenerate_matrices_do_not_exceed_the_true_value(orthonormal, dtype, monkeypatch) -> None:
    """The powers of such a matrix on a vector are dependent from the second on."""
    monkeypatch.setattr(leading_module, "_orthonormal", orthonormal)
    n = 40
    values = [torch.ones(n), torch.zeros(n), torch.eye(n)[0], torch.where(torch.arange(n) < 2, 3.0, 1.0)]
    for matrix in [*map(torch.diag, values), torch.outer(torch.arange(n) + 1.0, torch.ones(n))]:
        truth = float(torch.linalg.matrix_norm(matrix.double(), 2)) ** 2
        basis = None
        for _ in range(4):
            found = leading(matrix.to(dtype), exact=1, basis=basis)
            basis = found.basis
            # Shifts of 1e-13 a column, three times, make a basis shorter; its rounding may make it longer.
            assert float(found.squares[0]) <= truth * (1 + 8 * n * torch.finfo(dtype).eps)
            assert float(found.squares[0]) >= truth * (1 - 8 * n * torch.finfo(dtype).eps - 1e-10)


@pytest.mark.parametrize("exact", [8, 100])
def test_weights_that_are_not_finite_are_named(exact: int) -> None:
    w = torch.randn(20, 30)
    basis = leading(w, exact=exact).basis
    w[3, 4] = torch.nan
    with pytest.raises(ModelError, match="not finite"):
        leading(w, exact=exact, basis=basis)
    with pytest.raises(ModelError, match="not finite"):
        leading(w, exact=exact)


def gram_matrices(dtype: torch.dtype) -> torch.Tensor:
    """Gram matrices (3, 8, 8): of full rank, of rank one, and with entries far below rounding."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 8, 8, generator=generator, dtype=torch.float64)
    rows[1, 1:] = 0
    rows[2, 2:] *= 1e-12
    return (rows @ rows.mT).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eigenvectors_are_torchs_where_that_converges(dtype) -> None:
    for ours, theirs in zip(
        leading_module._solved(gram_matrices(dtype)), torch.linalg.eigh(gram_matrices(dtype)), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_torch_fails_matrices_are_solved_again(dtype, monkeypatch) -> None:
    solve = torch.linalg.eigh
    solved = []

    def fails_once(matrix):
        solved.append(matrix)
        if len(solved) == 1:
            raise torch.linalg.LinAlgError("did not converge")
        return solve(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", fails_once)
    grams = gram_matrices(dtype)
    values, vectors = leading_module._solved(grams)
    assert values.dtype == vectors.dtype == dtype
    rounding = (
        8 * torch.finfo(dtype).eps * values.abs().amax(-1)
    )  # eight entries per row, each up to eps / 8 of the largest, and the cast
    again = (vectors * values[:, None]) @ vectors.mT
    assert bool(((again - grams).abs().amax((-2, -1)) <= 4 * rounding).all())
    assert bool((solved[1][2][2:, 2:] == 0).all())  # what lay below rounding
