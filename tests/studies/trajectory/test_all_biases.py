"""Study `all-biases`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from excite.studies.trajectory import all_biases


def test_all_biases_end_in_a_trajectory_that_says_nothing():
    tiny = replace(all_biases.SCALES["quick"], seeds=1, steps=1000)
    variant = all_biases.variants(tiny)[0]
    (found,) = all_biases.compute([(variant.config, 0)], "cpu", lambda share: None)
    assert found.values["length_5"] == pytest.approx(100)
