"""Changes of a series, and numbers in sentences."""

import numpy as np

from excite.probes.findings import Change, binned_median, fall, first_nonfinite, rise


def test_noise_is_no_change():
    rng = np.random.default_rng(0)
    steps = np.arange(20_000)
    noisy = (steps, 10 + rng.standard_normal(len(steps)))
    noisy[1][777] = 1000
    assert fall(noisy).fraction < 0.1
    assert rise(noisy).fraction < 0.1
    assert len(binned_median(noisy)[0]) <= 51


def test_changes():
    series = (np.arange(5), np.array([1.0, 5.0, 4.9, 2.0, 1.0]))
    assert fall(series) == Change(5.0, 1.0, 2)
    assert rise(series) == Change(1.0, 1.0, 4)
    assert fall((np.arange(1), np.ones(1))) is None
    assert first_nonfinite((np.arange(3), np.array([1, np.inf, np.nan]))) == 1
    assert Change(0.0, 0.0, 0).fraction == 0
