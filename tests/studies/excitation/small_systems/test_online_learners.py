"""Small online learners whose excitation fades or persists."""

from __future__ import annotations

import numpy as np
import pytest

from excite.studies.excitation.small_systems import online_learners


@pytest.mark.parametrize("alpha", [0.5, 0.9, 1.0])
def test_attenuated_regression_is_a_product_of_contractions(alpha: float) -> None:
    """θ_T − θ* = Π_t (I − δ α^{2t} X'X) (θ_0 − θ*): with α < 1 the product does not go to zero."""
    found = online_learners.regression({"alpha": alpha, "steps": 40}, 3)
    rng = np.random.default_rng([3, 1])
    x, truth = rng.normal(size=(30, 3)), rng.normal(size=3)
    values, vectors = np.linalg.eigh(x.T @ x)
    left = np.prod([1 - 0.2 / values[-1] * alpha ** (2 * t) * values for t in range(40)], axis=0)
    expected = np.linalg.norm(left * (vectors.T @ truth)) / np.linalg.norm(truth)
    assert found.values["wrong"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("kind", "rank"), [("constant", 1), ("one frequency", 2), ("two frequencies", 4)])
def test_every_frequency_excites_two_directions(kind: str, rank: int) -> None:
    """Once the transient is over the rows (y, y', x, x') span one direction for a constant, two for a frequency."""
    truth = np.array([0.7, 0.06, 1.0, 0.5])
    rows, _ = online_learners.respond(truth, online_learners._input(kind, 400), np.zeros(400))
    sizes = np.linalg.svd(rows[200:], compute_uv=False)
    assert (sizes > 1e-9 * sizes[0]).sum() == rank


def test_the_response_is_that_of_the_state_space() -> None:
    """h ← Ah + Bx, y = Ch with A in companion form."""
    a1, a2, b1, b2 = truth = np.array([0.7, 0.06, 1.0, 0.5])
    a, b, c = np.array([[a1, 1.0], [a2, 0.0]]), np.array([b1, b2]), np.array([1.0, 0.0])
    x = np.random.default_rng(0).normal(size=30)
    h, outputs = np.zeros(2), []
    for value in x:
        h = a @ h + b * value
        outputs.append(c @ h)
    np.testing.assert_allclose(online_learners.respond(truth, x, np.zeros(30))[1], outputs, atol=1e-12)


def test_the_transient_of_a_constant_input_tells_everything() -> None:
    """Printed: under a constant input the relationship cannot be recovered. Online steps do not find it; least squares
    over the same outputs, from rest and without noise, does."""
    found = online_learners.linear_system({"input": "constant", "steps": 50}, 0).values
    assert found["wrong"] > 0.1
    assert found["least_squares"] < 1e-9


def test_an_unscaled_stochastic_gradient_stays_away_by_noise() -> None:
    found = {
        kind: [online_learners.stochastic_gradient({"scaling": kind, "steps": 4000}, s).values for s in range(5)]
        for kind in ("fast", "slow", "none")
    }
    wrong = {kind: np.median([values["wrong"] for values in runs]) for kind, runs in found.items()}
    assert wrong["slow"] < wrong["none"] < wrong["fast"]
    assert all(values["error"] == 0 for values in found["fast"])


def test_bandits_explore_as_often_as_they_say() -> None:
    """A single bandit in a plain loop with the same random numbers."""
    settings = {"exploring": "goes on", "steps": 300, "bandits": 1}
    found = online_learners.bandit(settings, 4)
    rng = np.random.default_rng([4, 5])
    paid, pulls = (rng.random((1, 2)) < online_learners.PULLS).astype(float)[0], [1, 1]
    for step in range(300):
        average = paid / pulls
        by_chance = int(rng.integers(2, size=1)[0])
        choice = by_chance if average[0] == average[1] else int(average[1] > average[0])
        if int(10 * np.log(step + 3)) > int(10 * np.log(step + 2)):
            choice = 1 - choice
        pulls[choice] += 1
        paid[choice] += float(rng.random(1)[0] < online_learners.PULLS[choice])
    assert found.values["error"] == pytest.approx(0.3 * (pulls[0] - 1) / 300)
    assert found.values["wrong"] == float(paid[0] / pulls[0] > paid[1] / pulls[1])
