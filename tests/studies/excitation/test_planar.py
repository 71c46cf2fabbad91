"""Boundaries and distances in the plane against searches along rays and over a grid."""

from __future__ import annotations

import math

import numpy as np
import pytest

from excite.studies.excitation.planar import Array, TwoLayer, around, cells, distances, margins, zero_set


def random_network(seed: int, units: int = 7) -> tuple[TwoLayer, Array, Array]:
    rng = np.random.default_rng(seed)
    hidden, bias, output = rng.normal(size=(units, 2)), rng.normal(size=units), rng.normal(size=units)
    x = rng.normal(size=(12, 2))
    middle = np.median(TwoLayer(hidden, bias, output, np.asarray(0.0))(x))  # both classes have points
    network = TwoLayer(hidden, bias, output, np.asarray(-middle))
    return network, x, (network(x) > 0).astype(float)


def nearest_along_rays(network: TwoLayer, point: Array, reach: float, rays: int = 361, steps: int = 1000) -> float:
    """The first change of sign along each of many rays, found on a fine grid and then by bisection."""
    angles = np.linspace(0, 2 * np.pi, rays, endpoint=False)
    directions = np.stack([np.cos(angles), np.sin(angles)], 1)
    t = np.linspace(0, reach, steps)
    values = network((point + t[:, None, None] * directions).reshape(-1, 2)).reshape(steps, rays) > 0
    changed = values != values[0]
    first = np.where(changed.any(0), changed.argmax(0), -1)
    found = math.inf
    for direction, k in zip(directions[first > 0], first[first > 0]):
        low, high = t[k - 1], t[k]
        for _ in range(40):
            middle = (low + high) / 2
            same = (network((point + middle * direction)[None])[0] > 0) == values[0, 0]
            low, high = (middle, high) if same else (low, middle)
        found = min(found, high)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_margins_are_what_a_search_along_rays_finds(seed: int) -> None:
    network, x, y = random_network(seed)
    exact = margins(network, x, y)
    for point, distance in zip(x[:3], exact):
        searched = nearest_along_rays(network, point, 1.05 * float(np.linalg.norm(np.ptp(x, axis=0))))
        assert distance <= searched + 1e-9
        assert searched <= distance * 1.005 + 1e-9  # the rays are a degree apart


@pytest.mark.parametrize("seed", range(6))
def test_cells_cover_the_box_and_f_is_affine_on_each(seed: int) -> None:
    network, x, _ = random_network(seed)
    box = around(x)
    area = 0.0
    for corners, slope, height in cells(network, box):
        a, b = corners, np.roll(corners, -1, axis=0)
        area += abs(float((a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]).sum())) / 2
        inside = np.random.default_rng(0).dirichlet(np.ones(len(corners)), 5) @ corners
        np.testing.assert_allclose(network(inside), inside @ slope + height, atol=1e-9)
    np.testing.assert_allclose(area, np.prod(box[1] - box[0]), rtol=1e-9)


def test_the_boundary_is_where_the_sign_changes() -> None:
    network, x, _ = random_network(0)
    segments = zero_set(network, around(x))
    assert len(segments) > 1
    np.testing.assert_allclose(network(segments.reshape(-1, 2)), 0, atol=1e-9)
    np.testing.assert_allclose(network(segments.mean(1)), 0, atol=1e-9)


def test_known_distances() -> None:
    network = TwoLayer(np.array([[1.0, 0.0], [-1.0, 0.0]]), np.zeros(2), np.ones(2), np.asarray(-1.0))  # |x₁| − 1
    x, y = np.array([[0.0, 3.0], [2.5, 0.0], [0.25, 0.0]]), np.array([0.0, 1.0, 1.0])
    np.testing.assert_allclose(margins(network, x, y), [1.0, 1.5, 0.0])  # the last one is decided wrong
    segment = np.array([[[0.0, 0.0], [1.0, 0.0]]])
    np.testing.assert_allclose(distances(np.array([[0.5, 2.0], [4.0, 4.0]]), segment), [2.0, 5.0])


def test_no_boundary_is_infinitely_far() -> None:
    network = TwoLayer(np.ones((1, 2)), np.zeros(1), np.ones(1), np.asarray(1.0))
    assert np.isinf(margins(network, np.array([[0.0, 0.0], [1.0, 1.0]]), np.ones(2))).all()
