"""Paths that slide along kinks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from excite.train import descent, gradient_flow
from excite.train.dynamics.sliding import tangent
from train.dynamics.flow_networks import READ, Valley, flat, residual


def test_a_path_that_slides_along_a_kink_is_followed() -> None:
    """R = |w| − w/2 + v²/2 slides along w = 0, where −∂R contains (0, −v): from (1, 1) w reaches 0 at t = 2, v = e^−t."""
    course = gradient_flow(Valley(1.0, 1.0), lambda m: (m.w.relu() + (-m.w).relu()) - m.w / 2 + m.v**2 / 2, 4.0,
                           at=[1.0, 2.0, 4.0], quantities=READ)  # fmt: skip
    np.testing.assert_allclose(course.values["w"], [0.5, 0.0, 0.0], atol=1e-11)
    np.testing.assert_allclose(course.values["v"], np.exp([-1.0, -2.0, -4.0]), atol=1e-9)
    assert course.sliding == pytest.approx(2.0, abs=1e-9)
    assert (course.slides, course.slack) == (0, 0.0)
    assert "slid along kinks for 2" in str(course)
    rest = gradient_flow(Valley(1.0, 1.0), lambda m: m.w.abs() + m.v**2 / 2, 60.0, tolerance=1e-8)
    assert rest.converged  # 0 is in the subdifferential, though neither side has a gradient that vanishes
    assert rest.times[-1] == pytest.approx(np.log(1e8), rel=0.2)


@pytest.mark.slow
def test_along_an_unseen_kink_it_descends_in_small_steps() -> None:
    """The same |w| written with `where`: plain descent zigzags around w = 0, and says how often."""
    course = gradient_flow(Valley(1.0, 1.0), lambda m: torch.where(m.w > 0, m.w, -m.w) - m.w / 2 + m.v**2 / 2, 4.0,
                           shortest=5e-3, at=[2.0, 4.0], quantities=READ)  # fmt: skip
    assert course.slides > 300
    assert np.abs(course.values["w"]).max() < 7.5e-3 + 1e-12
    np.testing.assert_allclose(course.values["v"], np.exp([-2.0, -4.0]), atol=5e-4)
    assert course.slack > 0
    assert "slides" in str(course)


def test_a_path_leaves_a_kink_when_one_side_lets_it_go() -> None:
    """R = |w| − wv − v: from (0.1, 0), w' = v − 1 and v' = w + 1 until w = 0; then v' = 1 until v = 1; then w = cosh − 1."""
    z = (1 - np.sqrt(0.79)) / 0.1  # e^t where 0.05 e^t + 1.05 e^−t = 1
    first = np.log(z)
    leaves = first - (0.05 * z - 1.05 / z)
    times = [first / 2, (first + leaves) / 2, leaves + 0.5, leaves + 1.5]
    w = [0.05 * np.exp(times[0]) + 1.05 * np.exp(-times[0]) - 1, 0.0, np.cosh(0.5) - 1, np.cosh(1.5) - 1]
    v = [
        1 + 0.05 * np.exp(times[0]) - 1.05 * np.exp(-times[0]),
        1 - (leaves - first) / 2,
        1 + np.sinh(0.5),
        1 + np.sinh(1.5),
    ]
    for method in ("DOP853", "RK45", "LSODA"):
        course = gradient_flow(Valley(0.1, 0.0), lambda m: m.w.abs() - m.w * m.v - m.v, leaves + 1.5, at=times,
                               quantities=READ, method=method)  # fmt: skip
        # Each step errs by rtol = 1e-9 of the weights, and errors grow like e^t while the path moves off the kink. LSODA keeps
        # to its tolerance less closely.
        tolerance = course.steps * 1e-9 * np.exp(first + 1.5) * (100 if method == "LSODA" else 1)
        assert tolerance < 1e-4
        np.testing.assert_allclose(course.values["w"], w, atol=tolerance)
        np.testing.assert_allclose(course.values["v"], v, atol=tolerance)
        assert course.sliding == pytest.approx(leaves - first, abs=1e-5)
        assert course.slides == 0


@pytest.mark.slow
def test_a_residual_network_slides_to_the_limit_of_descent() -> None:
    """174 weights: creeping up to the kinks took more than 13,000 gradients to t = 0.344, most of them while sliding."""
    model, loss = residual(0)
    course = gradient_flow(model, loss, 0.344, at=4, quantities={"weights": lambda m: torch.from_numpy(flat(m))})
    assert course.slides == 0
    assert course.sliding > 0.1
    assert course.evaluations < 1500
    assert np.all(np.diff(course.values["loss"]) < 0)
    # Plain descent with smaller and smaller steps converges to the sliding path: its error falls with the step.
    errors = []
    for steps in (500, 2000):
        slow = descent(model, loss, steps, step=0.344 / steps, every=steps)
        errors.append(float(np.abs(flat(slow.model) - flat(course.model)).max()))
    assert errors[1] < 2e-4
    assert errors[1] < errors[0] / 2


def test_equal_points_slide_along_one_kink() -> None:
    """Two equal points have two switching values with the same zeros: held and let go together."""
    course = gradient_flow(
        Valley(0.1, 0.0), lambda m: (torch.stack([m.w, m.w]).abs() / 2).sum() - m.w * m.v - m.v, 2.0, at=[2.0],
        quantities=READ,
    )  # fmt: skip
    one = gradient_flow(Valley(0.1, 0.0), lambda m: m.w.abs() - m.w * m.v - m.v, 2.0, at=[2.0], quantities=READ)
    np.testing.assert_allclose(course.values["w"], one.values["w"], atol=1e-9)
    assert (course.slides, course.sliding) == (0, pytest.approx(one.sliding, abs=1e-6))


def test_normals_dependent_up_to_the_error_count_as_dependent() -> None:
    """n₃ = n₁ + n₂ on the surface, where the gradient has no part along what the error of 1e-10 adds to n₃: only n₁ and n₂ are taken off."""
    draw = np.random.default_rng(0)
    normals, gradient, off = draw.normal(size=(2, 8)), draw.normal(size=8), draw.normal(size=8)
    expected = tangent(gradient, normals)
    assert np.abs(normals @ expected).max() < 1e-14
    for error in (0.0, 1e-13, 1e-10, 1e-8):
        result = tangent(gradient, np.vstack([normals, normals.sum(0) + error * off]))
        np.testing.assert_allclose(result, expected, atol=1e-14 + 10 * error)
    result = tangent(gradient, np.vstack([normals, normals.sum(0) + 1e-3 * off]))  # a surface of its own
    assert abs(result @ off) < 1e-9 < abs(expected @ off)
