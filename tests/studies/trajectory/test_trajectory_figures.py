"""Curves and dots that trajectory studies share."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from excite.studies.study import VariantResult
from excite.studies.trajectory.trajectory_figures import bands, curves, dots

DETAILS = {
    "ω = 1": [{"epochs": [1.0, 2.0], "loss": [4.0, 2.0]}, {"epochs": [1.0, 2.0], "loss": [2.0, 0.0]}],
    "ω = 2": [{"epochs": [1.0, 2.0], "loss": [1.0, 1.0]}],
}


def test_a_line_is_the_mean_over_repeats() -> None:
    axis = Figure().subplots()
    curves(axis, DETAILS, "loss")
    assert [line.get_label() for line in axis.lines] == list(DETAILS)
    assert axis.lines[0].get_ydata().tolist() == [3.0, 1.0]
    assert axis.get_xlim() == (0, 2)
    assert "means over 2 repeats" in bands(DETAILS)


def test_bars_are_geometric_means() -> None:
    axis = Figure().subplots()
    numbers = [VariantResult("ω = 1", seed, {"variance": value}) for seed, value in enumerate((1.0, 4.0))]
    dots(axis, ["ω = 1"], numbers, "variance")
    each, mean = axis.lines
    assert each.get_ydata().tolist() == [1.0, 4.0]
    assert np.isclose(mean.get_ydata()[0], 2.0)
    assert [label.get_text() for label in axis.get_xticklabels()] == ["1"]
