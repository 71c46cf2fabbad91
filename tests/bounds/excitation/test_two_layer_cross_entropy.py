"""Theorem 3: covers, the counterexample on a kink, and trainings."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch

from bounds.references import lipschitz_by_enumeration
from bounds.trainings import train_two_layer
from excite import ExciteError
from excite.bounds import directional_lipschitz
from excite.bounds.excitation.two_layer_cross_entropy import smallest_cover

COUNT, POINTS, UNITS = 12, 4, 8


@pytest.fixture(scope="module", params=[1, 2, 4])
def trained(request):
    rng = np.random.default_rng(request.param)
    x = torch.from_numpy(rng.normal(size=(COUNT, POINTS, request.param)))
    y = torch.from_numpy(rng.integers(0, 2, (COUNT, POINTS)))
    return x, y, *train_two_layer(x, y, UNITS, 4000, 1.0, 0)


def scaled_lipschitz(v, b, w, x, y):
    margins = (2 * y - 1) * (np.maximum(x @ v.T + b, 0) @ w)
    return lipschitz_by_enumeration(v, b, w) / margins.min()


@pytest.mark.slow
def test_the_bound_holds_on_trainings(trained):
    valued = 0
    for k in range(COUNT):
        x, y, v, b, w = (t[k].numpy() for t in trained)
        bound = directional_lipschitz(v, b, w, x, y)
        if "at any time" not in bound.terms:
            assert "correctly" in bound.failed[0].text
            continue
        truth = scaled_lipschitz(v, b, w, x, y)
        assert truth <= bound.terms["sum of |w| ‖V‖"] * (1 + 1e-9)
        assert bound.terms["sum of |w| ‖V‖"] <= bound.terms["at any time"] * (1 + 1e-9)
        if bound.value is not None:
            assert bound.value == bound.terms["at any time"]
            valued += math.isfinite(bound.value)
    assert valued >= 5


@pytest.mark.slow
def test_at_any_time_it_holds_for_untrained_weights():
    rng = np.random.default_rng(0)
    said = 0
    for _ in range(100):
        n = int(rng.integers(1, 4))
        x, v, b, w = rng.normal(size=(5, n)), rng.normal(size=(4, n)), rng.normal(size=4), rng.normal(size=4)
        f = np.maximum(x @ v.T + b, 0) @ w
        if not f.all():
            continue
        bound = directional_lipschitz(v, b, w, x, (f > 0).astype(int), support=float(rng.choice([0.1, 1.0, 10.0])))
        said += math.isfinite(bound.terms["at any time"])
        assert bound.terms["sum of |w| ‖V‖"] <= bound.terms["at any time"] * (1 + 1e-9)
    assert said > 50


def on_two_points(one: float, two: float):
    """The solution of least norm with f(one) = 1, f(two) = −1: each unit active on one point, its kink on the other."""
    v, b = np.array([[1.0], [-1.0]]), np.array([-two, one])
    lengths = np.sqrt(v[:, 0] ** 2 + b**2)
    outputs = np.array([one - two, one - two])  # (Vx + b)₊ of each unit on its point
    size = np.sqrt(lengths / outputs)  # |w| = ‖(V, b)‖ = size, w(Vx + b) = ±1
    return v * (size / lengths)[:, None], b * size / lengths, size * np.array([1.0, -1.0])


@pytest.mark.slow
def test_theorem_3_as_printed_fails_on_kinks():
    """I = {3}, J = {2}: the printed bound is 1, but from f(2) = −1 to f(3) = 1 the slope is 2."""
    v, b, w = on_two_points(3.0, 2.0)
    x, y = np.array([[3.0], [2.0]]), np.array([1, 0])
    assert np.maximum(x @ v.T + b, 0) @ w == pytest.approx([1, -1])
    bound = directional_lipschitz(v, b, w, x, y)
    # A stationary point in the sense of Clarke: multipliers reproduce it, on kinks with fractions between 0 and 1 of them.
    assert bound.terms["residual"] < 1e-7
    a = np.column_stack([x, [1.0, 1.0]])
    pulls = [np.linalg.solve(a.T, sign * np.r_[v[k], b[k]] / abs(w[k])) for k, sign in ((0, 1), (1, -1))]
    whole = np.array([pulls[0][0], -pulls[1][1]])  # μ of each point, where it is active
    fractions = np.array([pulls[1][0], -pulls[0][1]]) / whole  # its share where it lies on the kink
    assert (whole > 0).all()
    assert ((fractions > 0) & (fractions < 1)).all()
    # The printed quantities, with the definition of the theorem: strictly active.
    active = x @ v.T + b > 1e-9
    assert active.tolist() == [[True, False], [False, True]]
    n_node, n_sup, smallest = 2, 1, min(3.0**2, 2.0**2)
    printed = n_node * math.sqrt(n_sup) / math.sqrt(smallest)
    assert printed == pytest.approx(1.0)
    assert lipschitz_by_enumeration(v, b, w) == pytest.approx(2.0)
    assert bound.value >= 2.0
    # Training goes there: any network with these outputs has slope two, and units put their kinks on the points.
    many = torch.from_numpy(np.tile(x, (10, 1, 1)))
    labels = torch.from_numpy(np.tile(y, (10, 1)))
    hidden, bias, out = (t.numpy() for t in train_two_layer(many, labels, 6, 5000, 1.0, 1))
    kinks = []
    for k in range(10):
        trained = directional_lipschitz(hidden[k], bias[k], out[k], x, y)
        if trained.value is not None:
            kinks.append(trained.terms["on a kink"])
            assert trained.value >= scaled_lipschitz(hidden[k], bias[k], out[k], x, y) >= 2 - 1e-9
    assert len(kinks) >= 3
    assert min(kinks) >= 1


def test_one_unit_a_class_by_hand():
    """x = ±1, units (1, 1) and (−1, 1): μ = √½ each; Σ|w|‖V‖ = 1, and the hull of one point (1, 1) is √2 away."""
    size = 2**-0.25
    v, b, w = np.array([[1.0], [-1.0]]) * size / 2**0.5, np.ones(2) * size / 2**0.5, np.array([size, -size])
    bound = directional_lipschitz(v, b, w, [[1.0], [-1.0]], [1, 0])
    assert bound.terms["sum of |w| ‖V‖"] == pytest.approx(1.0)
    assert bound.terms["n_node"] == 2
    assert bound.terms["n_sup"] == 1
    assert bound.terms["lambda"] == pytest.approx(1.0)
    assert bound.terms["stated"] == pytest.approx(2.0)
    assert bound.value == pytest.approx(2**0.5)
    assert bound.holds


def test_smallest_covers_against_enumeration():
    rng = np.random.default_rng(0)
    for _ in range(60):
        active = rng.random((int(rng.integers(1, 7)), int(rng.integers(1, 8)))) < 0.4
        costs = rng.uniform(0.1, 2, active.shape[1])
        for price in (None, costs):
            each = np.ones(active.shape[1]) if price is None else price
            covers = [
                sum(each[list(c)])
                for size in range(active.shape[1] + 1)
                for c in combinations(range(active.shape[1]), size)
                if active[:, list(c)].any(1).all()
            ]
            cover, exact = smallest_cover(active, price)
            assert exact
            assert (cover is None) == (not covers)
            if cover is not None:
                assert active[:, cover].any(1).all()
                assert each[cover].sum() == pytest.approx(min(covers))


def test_units_that_never_activate_are_said_and_do_no_harm():
    v, b, w = on_two_points(3.0, 2.0)
    more = directional_lipschitz(np.vstack([v, [[1.0]]]), np.r_[b, -50.0], np.r_[w, 0.0], [[3.0], [2.0]], [1, 0])
    assert more.terms["units never active"].tolist() == [2]
    assert more.terms["lambda"] == directional_lipschitz(v, b, w, [[3.0], [2.0]], [1, 0]).terms["lambda"]


def test_what_fails_is_said():
    v, b, w = on_two_points(3.0, 2.0)
    x = [[3.0], [2.0]]
    wrong = directional_lipschitz(v, b, w, x, [0, 1])
    assert wrong.value is None
    assert "correctly" in wrong.failed[0].text
    vector = directional_lipschitz(v, b, np.ones((2, 2)), x, [1, 0])
    assert vector.value is None
    assert "scalar" in vector.failed[0].text
    early = directional_lipschitz(v, b + 0.5, w, [[3.0], [1.0]], [1, 0])
    assert early.value is None


@pytest.mark.parametrize(
    "change",
    [{"hidden_bias": np.ones(3)}, {"output_weight": np.ones(3)}, {"x": np.ones((2, 2))}, {"hidden_weight": np.full((2, 1), np.nan)}],
)  # fmt: skip
def test_bad_networks(change):
    v, b, w = on_two_points(3.0, 2.0)
    given = {"hidden_weight": v, "hidden_bias": b, "output_weight": w, "x": [[3.0], [2.0]], "y": [1, 0], **change}
    with pytest.raises(ExciteError):
        directional_lipschitz(**given)
