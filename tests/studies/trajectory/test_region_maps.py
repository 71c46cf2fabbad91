"""Measures and the picture of a map with known regions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from excite.bounds.relu_network import as_module
from excite.lipschitz import region_map
from excite.studies.trajectory.region_maps import clustering, density, region_picture


def test_measures_of_a_known_map() -> None:
    """f = |z₁| + |z₂| − …: four regions that meet in the middle, two constants side by side."""
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    none = torch.zeros(2, dtype=torch.float64)
    last = (torch.tensor([[1.0, 1.0]], dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    found = region_map(as_module([(weight, none), last]), none, weight[0], weight[1], size=40)
    assert found.count == 4
    assert density(found) == pytest.approx(3.0)  # four regions on a quarter of the square, and four on the rest
    # Constants 0, 1, 1, √2; pairs that touch: (0, 1) twice and (1, √2) twice.
    near = (2 * 1 + 2 * (2**0.5 - 1)) / 4
    anywhere = (2 * 1 + 2**0.5 + 0 + 2 * (2**0.5 - 1)) / 6
    assert clustering(found) == pytest.approx(near / anywhere)
    picture = region_picture(found).axes[0]
    assert picture.get_title() == "4 linear regions found"
    np.testing.assert_allclose(picture.images[0].get_extent(), [-1, 1, -1, 1])
    line = np.array(picture.lines[0].get_data())
    assert np.nanmax(np.abs(line).min(0)) < 1e-12  # borders are the two axes
