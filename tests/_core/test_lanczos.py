import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from excite._core.lanczos import krylov_space, largest

SPECTRA = {
    "identity": lambda n: torch.ones(n),
    "zero": lambda n: torch.zeros(n),
    "rank one": lambda n: torch.eye(n)[0],
    "projection": lambda n: (torch.arange(n) < n / 2).float(),
    "two values": lambda n: torch.where(torch.arange(n) < 2, 3.0, 1.0),
    "clusters": lambda n: 1 + 1e-9 * torch.linspace(0, 1, n) + (torch.arange(n) % 2),
    "decaying": lambda n: 10.0 ** -torch.linspace(0, 20, n),
    "even": lambda n: torch.linspace(0, 1, n),
    "small": lambda n: 1e-12 * torch.linspace(0, 1, n),
}


def made(spectrum, width, turned, dtype):
    """A symmetric matrix with this spectrum: diagonal, or `turned`; and its largest eigenvalue in float64, after rounding."""
    values = SPECTRA[spectrum](width).double()
    matrix = torch.diag(values)
    if turned:
        generator = torch.Generator().manual_seed(width)
        q, _ = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64))
        matrix = q @ matrix @ q.T
        matrix = (matrix + matrix.T) / 2
    matrix = matrix.to(dtype)
    return matrix, max(0.0, float(torch.linalg.eigvalsh(matrix.double())[-1]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_the_basis_is_orthonormal_in_an_exhausted_krylov_space(spectrum, turned, dtype):
    for width in (1, 2, 3, 8, 30):
        matrix, top = made(spectrum, width, turned, dtype)
        eps, generator = torch.finfo(dtype).eps, torch.Generator().manual_seed(0)
        starts = {
            "random": torch.randn(width, generator=generator, dtype=dtype),
            "axis": torch.eye(width, dtype=dtype)[0],
            "zero": torch.zeros(width, dtype=dtype),
        }
        for kind, start in starts.items():
            count = min(20, width)
            calls = []
            space, images = krylov_space(lambda v, m=matrix, c=calls: c.append(1) or m @ v, start, count)
            assert len(calls) == count
            inner = space.double() @ space.double().T
            ones = inner.diagonal().round()
            # A pass leaves at least half of a unit vector, so what is left within the space is at most twice its rounding.
            assert float((inner - torch.diag(ones)).abs().max()) <= 8 * width * eps
            assert set(ones.tolist()) <= {0.0, 1.0}
            assert torch.equal(ones, ones.sort(descending=True).values)  # it ends for good
            ritz = float(torch.linalg.eigvalsh((space @ images.T).double())[-1])
            assert ritz <= top * (1 + 8 * (width + count) * eps) + torch.finfo(dtype).tiny
            if kind == "random" and spectrum in ("identity", "zero", "rank one", "projection", "two values"):
                assert ritz >= top * (1 - 8 * (width + count) * eps)
            if kind == "zero":
                assert not ones.any()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_both_bounds_hold_once_the_krylov_space_is_exhausted(spectrum, turned):
    for width in (1, 2, 3, 30, 120):
        matrix, top = made(spectrum, width, turned, torch.float64)
        array, near = matrix.numpy(), 8 * width * np.finfo(float).eps
        for seed in range(3):
            low, high = largest(lambda v, m=array: m @ v, width, lambda low, high: False, seed=seed)
            assert low <= top * (1 + near)
            assert high >= top * (1 - near)
            assert math.isfinite(low)


class NothingRead(TorchDispatchMode):
    """Refuses to hand a number from a tensor to Python, for which a GPU would have to be waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name not in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_back_from_the_device():
    start, matrix = torch.randn(6, generator=torch.Generator().manual_seed(0)), torch.eye(6)
    with NothingRead():
        krylov_space(lambda v: matrix @ v, start, 5)
    with pytest.raises(AssertionError), NothingRead():
        float(start[0])


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_an_exhausted_space_are_zero_or_orthonormal(seed):
    """With the identity one row spans the space; rounding may leave another direction, which is as good as any."""
    start = torch.randn(6, generator=torch.Generator().manual_seed(seed))
    space, images = krylov_space(lambda v: v, start, 5)
    gram = space @ space.T
    near = 16 * torch.finfo(torch.float32).eps
    assert torch.allclose(gram - gram.diag().diag(), torch.zeros(5, 5), atol=near)
    assert all(entry == 0 or abs(entry - 1) <= near for entry in gram.diag().tolist())
    assert torch.equal(space, images)


def test_a_product_that_is_not_finite_stays_visible():
    space, images = krylov_space(lambda v: v * torch.nan, torch.ones(4), 3)
    assert not (space @ images.T).isfinite().all()
