"""The largest number of active units: by mixed-integer program, against all regions of the plane."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.optimize import linprog

from bounds.networks import regions
from excite.bounds import most_active
from excite.errors import InputError


@pytest.mark.parametrize("seed", range(40))
def test_in_the_plane_it_is_the_maximum_over_all_regions(seed):
    rng = np.random.default_rng(seed)
    r = int(rng.integers(1, 9))
    V, b = rng.standard_normal((r, 2)), rng.standard_normal(r) * rng.choice([0.01, 1, 100])
    weights = None if seed % 2 else rng.uniform(0.1, 3, r)
    c = np.ones(r) if weights is None else weights
    truth = max(float(c[list(on)].sum()) for on in regions(V, b))
    found = most_active(V, b, weights)
    assert found.exact
    assert found.value == pytest.approx(truth, rel=1e-9)
    # The witness is real.
    assert tuple(np.flatnonzero(V @ np.array(found.point) + b > 0)) == found.units
    assert c[list(found.units)].sum() == pytest.approx(truth, rel=1e-9)


@pytest.mark.parametrize(("r", "n", "seed"), [(7, 1, 0), (6, 3, 1), (7, 4, 2), (8, 3, 3), (3, 5, 4)])
def test_in_other_dimensions_it_is_the_maximum_over_all_subsets(r, n, seed):
    rng = np.random.default_rng(seed)
    V, b = rng.standard_normal((r, n)), rng.standard_normal(r) - 1
    # Every subset by a linear program of its own: V_k x + b_k ≥ t for all k of it, with t > 0.
    truth = 0
    for size in range(r, 0, -1):
        for chosen in itertools.combinations(range(r), size):
            rows = np.column_stack([-V[list(chosen)], np.ones(size)])
            lp = linprog([*[0] * n, -1], rows, b[list(chosen)], bounds=[(-1e4, 1e4)] * n + [(None, 1)])
            if lp.status == 0 and lp.x[-1] > 1e-7:
                truth = max(truth, size)
        if truth:
            break
    found = most_active(V, b)
    assert found.exact
    assert found.value == truth


def test_units_with_bias_only_are_on_everywhere_or_nowhere():
    V, b = np.array([[1.0, 0], [0, 0], [0, 0], [0, 0]]), np.array([-5.0, 1, -1, 0])
    found = most_active(V, b)
    assert (found.value, found.exact, found.units) == (2, True, (0, 1))
    assert most_active(V[1:], b[1:]).value == 1


def test_opposite_units_are_never_on_together():
    V = np.array([[1.0, 0], [-1, 0]])
    assert most_active(V, np.array([-1.0, -1])).value == 1
    assert most_active(V, np.array([1.0, 1])).value == 2  # a strip
    assert most_active(V, np.array([0.0, 0])).value == 1  # a strip of width zero is empty


@pytest.mark.parametrize("seed", range(10))
def test_without_biases_and_with_parallel_units(seed):
    rng = np.random.default_rng(seed)
    V = rng.standard_normal((6, 2))
    V[4], V[5] = -2 * V[0], 0.5 * V[1]
    for b in (np.zeros(6), np.array([0.0, 0, 0, 0, 0, 1])):
        found = most_active(V, b)
        assert found.exact
        assert found.value == max(map(sum, regions(V, b)))


def test_without_time_it_is_an_upper_bound_and_says_so():
    rng = np.random.default_rng(0)
    V, b = rng.standard_normal((40, 6)), rng.standard_normal(40) - 2
    found = most_active(V, b, seconds=1e-6)
    assert not found.exact
    tried = rng.standard_normal((20000, 6)) * 10
    assert found.value >= (tried @ V.T + b > 0).sum(1).max()
    assert found.value >= found.found


def test_mismatched_and_broken_arrays_are_refused():
    V, b = np.ones((2, 3)), np.ones(2)
    for wrong in ((V[0], b), (V, b[:1]), (V * np.nan, b), (V, b, np.ones(3)), (V, b, -np.ones(2))):
        with pytest.raises(InputError, match="expected"):
            most_active(*wrong)
