"""Quantities of a spectrum by their definitions."""

import numpy as np
import pytest

from excite.probes.spectrum import Spectrum


def test_the_quantities_by_their_definitions():
    values = np.array([4.0, 2.0, 1.0, 1.0, 0.0])
    spectrum = Spectrum(values, 0.0, 8.0, 1e-9)
    shares = values / 8
    assert float(spectrum.effective_rank) == pytest.approx(np.exp(-(shares[:4] * np.log(shares[:4])).sum()))
    assert float(spectrum.participation_ratio) == pytest.approx(64 / 22)
    assert float(spectrum.rank) == 4
    assert float(spectrum.smallest) == 0
    assert [float(spectrum.explained(k)) for k in (0, 1, 2, 5, 80)] == [0, 0.5, 0.75, 1, 1]
    assert spectrum.effective_rank.exact
