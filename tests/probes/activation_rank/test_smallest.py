import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from excite import InputError
from excite._core.lanczos import largest
from excite.probes import smallest_eigenvalue, smallest_eigenvalues
from excite.probes.activation_rank.smallest import default_tolerance, rounding


def with_spectrum(values, seed=0):
    rng = np.random.default_rng(seed)
    q = np.linalg.qr(rng.standard_normal((len(values), len(values))))[0]
    return torch.from_numpy((q * values) @ q.T)


def second_moments(seed, width=100, kind="relu"):
    torch.manual_seed(seed)
    x = torch.randn(5 * width, width, dtype=torch.float64)
    if kind != "normal":
        x = x.relu()
    if kind == "dead":
        x[:, : width // 4] = 0
    if kind == "dependent":
        x[:, : width // 4] = x[:, width // 4 : width // 2] @ torch.randn(width // 4, width // 4, dtype=torch.float64)
    if kind == "few":
        x = x[: width // 2]
    if kind == "steep":
        x = x * torch.logspace(0, -6, width, dtype=torch.float64)
    return x.T @ x


KINDS = ["relu", "normal", "dead", "dependent", "few", "steep"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [8, 64, 100, 240])
@pytest.mark.parametrize("guess", [0.0, 0.5, None])
def test_value_error_and_rank_against_all_eigenvalues(kind, width, guess):
    for seed, tolerance in ((0, 1e-9), (1, 1e-5)):
        matrix = second_moments(seed, width, kind)
        truth = torch.linalg.eigvalsh(matrix)
        found = smallest_eigenvalue(matrix, tolerance, guess=guess)
        assert found.rank == int((truth > tolerance * truth[-1]).sum())
        assert found.excited == (found.rank == width)
        assert found.sure
        assert abs(found.value - float(truth[0])) <= found.error * found.largest + 1e-14 * float(truth[-1])
        assert found.error <= max(1.1e-4, 1.1 * tolerance)
        assert 0.5 * float(truth[-1]) <= found.largest <= float(truth[-1]) * (1 + 1e-9)
        if found.excited:  # and a tenth of the value itself
            assert found.error * found.largest <= 0.11 * found.value + rounding(width) * found.largest


@given(
    width=st.integers(65, 90),
    low=st.floats(-12, 0),
    zeros=st.integers(0, 20),
    tolerance=st.sampled_from([1e-10, 1e-7, 1e-3]),
    seed=st.integers(0, 999),
)
@settings(max_examples=80)
def test_the_verdict_is_that_of_all_eigenvalues(width, low, zeros, tolerance, seed):
    values = np.geomspace(10.0**low, 1, width)
    values[:zeros] = 0
    matrix = with_spectrum(values, seed)
    truth = torch.linalg.eigvalsh(matrix).numpy()
    if (abs(truth / truth[-1] - tolerance) < 2 * rounding(width)).any():
        return
    found = smallest_eigenvalue(matrix, tolerance)
    assert found.rank == (truth > tolerance * truth[-1]).sum()
    assert abs(found.value - truth[0]) <= found.error * found.largest + 1e-13


def test_an_eigenvalue_at_the_tolerance_is_said_to_be_in_doubt():
    values = np.linspace(0.1, 1, 100)
    values[0] = 1e-7 * (1 + 1e-9)
    assert not smallest_eigenvalue(with_spectrum(values), 1e-7).sure
    for beside, excited in ((1.01e-7, True), (0.99e-7, False)):
        values[0] = beside
        found = smallest_eigenvalue(with_spectrum(values), 1e-7)
        assert (found.excited, found.sure) == (excited, True)


def test_only_the_lower_triangle_is_read():
    for kind in KINDS:
        matrix = second_moments(0, 100, kind)
        assert smallest_eigenvalue(matrix.tril()) == smallest_eigenvalue(matrix)


def test_many_matrices_one_after_the_other():
    matrices = [second_moments(seed, 100, kind) for seed in range(3) for kind in KINDS]
    for matrix, found in zip(matrices, smallest_eigenvalues(matrices, 1e-9)):
        truth = torch.linalg.eigvalsh(matrix)
        assert found.rank == int((truth > 1e-9 * truth[-1]).sum())
        assert abs(found.value - float(truth[0])) <= found.error * found.largest + 1e-14 * float(truth[-1])


@pytest.mark.parametrize("width", [5, 100])
def test_zero_and_one(width):
    zero = smallest_eigenvalue(torch.zeros(width, width))
    assert (zero.rank, zero.value, zero.largest) == (0, 0, 0)
    one = smallest_eigenvalue(torch.eye(width))
    assert one.excited
    assert one.value == pytest.approx(1)


def test_refusals():
    with pytest.raises(InputError, match="square"):
        smallest_eigenvalue(torch.zeros(2, 3))
    with pytest.raises(InputError, match="finite"):
        smallest_eigenvalue(torch.full((70, 70), float("nan")))


def test_the_tolerance_is_above_rounding_of_dependent_columns():
    """Columns that depend on each other up to float32: their noise must not count as a direction."""
    for width in (16, 64, 256):
        torch.manual_seed(width)
        x = torch.randn(4 * width, width)
        x[:, : width // 2] = x[:, width // 2 :] @ torch.randn(width - width // 2, width // 2)
        rows = x.double()
        values = torch.linalg.eigvalsh(rows.T @ rows)
        tolerance = default_tolerance(width, torch.float32)
        assert int((values > tolerance * values[-1]).sum()) == width // 2
        assert smallest_eigenvalue(rows.T @ rows, tolerance).rank == width // 2


@pytest.mark.parametrize("decay", [0, 1, 6])
def test_the_largest_eigenvalue_lies_between_the_bounds(decay):
    rng = np.random.default_rng(decay)
    for seed in range(40):
        values = np.sort(rng.random(120) * np.geomspace(10.0**-decay, 1, 120))
        matrix = with_spectrum(values, seed).numpy()
        for most in (3, 9, 25, 60):
            low, high = largest(lambda v, m=matrix: m @ v, 120, lambda low, high: False, max_products=most, seed=seed)
            assert low <= values[-1] * (1 + 1e-12)
            assert high >= values[-1] * (1 - 1e-12)
        assert high <= values[-1] * 1.2
