"""Length, variance and distance of the first bias (Theorem 1, Corollaries 2 and 3)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from excite.bounds import (
    bias_distance,
    bias_variance,
    first_layer_lipschitz,
    trajectory_length,
)
from excite.errors import InputError


def test_counterexample_corollary_2():
    """T = {0, 1}, b = 0, 0, 5: the iterates of T have variance 0, the printed bound is positive."""
    # One linear unit f = x + b, α = 1: the first step has error 0+, the second 5.
    errors, steep, sigma = np.array([1e-3, 5.0]), np.ones(2), np.ones(2)
    iterates = np.array([0.0, 1e-3, 5.001])
    printed = (steep / sigma).mean() ** 2 * (2 / (1 / errors**2).sum()) / 4
    assert iterates[:2].var() < printed
    bound = bias_variance(1.0, errors, steep, sigma)
    assert 0 < bound.value <= iterates.var()


def test_the_constant_of_corollary_2_cannot_be_better():
    """Iterates along the top eigenvector of the path's Laplacian, errors as large as the steps: equality."""
    for m in (2, 3, 5, 12):
        iterates = np.array([(-1.0) ** k * math.sin(math.pi * (k + 0.5) / m) for k in range(m)])
        steps = np.abs(np.diff(iterates))
        # equality in Cauchy-Schwarz needs ‖Δ‖/ε proportional to 1/ε · ... : α λ/σ = ‖Δ‖/ε with ε = 1/‖Δ‖
        errors = 1 / steps
        bound = bias_variance(1.0, errors, steps**2, 1.0)
        assert bound.value == pytest.approx(iterates.var(), rel=1e-12)


def test_length_and_distance():
    below, above = trajectory_length([1.0, 2.0], 2.0, [0.5, 1.0])
    assert (below.value, above.value) == (1.5, 4.0)
    assert trajectory_length([1.0, 2.0], 2.0, [0.5, 0.0])[1].value == math.inf
    assert trajectory_length([1.0, 0.0], 2.0, [0.5, 0.0], [2.0, 0.0])[1].value == 2
    far = bias_distance(0.1, [1.0, 2.0], [1.0, 2.0], [0.5, 1.0], updates=[1.0, 1.5], sgd=True)
    assert far.value == pytest.approx(0.1 * (2 + 4))
    assert far.terms["path"] == pytest.approx(0.1 * (1 + 3))
    assert far.holds
    assert bias_distance(0.1, [0.0, 2.0], [1.0, 2.0], [0.0, 1.0]).value == pytest.approx(0.4)
    assert bias_variance(0.1, [0.0, 1.0], [1.0, 1.0], 1.0).value == 0
    assert bias_variance(0.1, [1.0], [1.0], 1.0, sgd=False).value is None
    for call in (
        lambda: bias_variance(0.1, [1.0], [1.0, 2.0], 1.0),
        lambda: bias_variance(0.1, [1.0], [1.0], 0.0),
        lambda: bias_variance(0.1, [1.0], [1.0], 1.0, form="x"),
        lambda: bias_distance(0.1, [-1.0], [1.0], 1.0),
        lambda: trajectory_length([1.0], 0.0, 0.0),
        lambda: first_layer_lipschitz([1.0], [1.0], [1.0], -1.0, 0.1),
    ):
        with pytest.raises(InputError):
            call()
