"""Changes of a series, and numbers in sentences."""

import numpy as np
import pytest

from excite.probes.findings import Change, binned_median, fall, first_nonfinite, learned, needed_rank, noise, rise


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
    assert (fall(series).before, fall(series).now, fall(series).since) == (5.0, 1.0, 2)
    assert (rise(series).before, rise(series).now, rise(series).since) == (1.0, 1.0, 4)
    assert fall((np.arange(1), np.ones(1))) is None
    assert first_nonfinite((np.arange(3), np.array([1, np.inf, np.nan]))) == 1
    assert Change(0.0, 0.0, 0).fraction == 0


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 6, 10, 20, 50, 2000])
@pytest.mark.parametrize("draw", ["normal", "laplace"])
def test_series_of_pure_noise_show_no_change(draw, count):
    """Stated level: 1 %, of 1000 series; more than 22 happen once in 2000 times."""
    rng = np.random.default_rng(count)
    rows = getattr(rng, draw)(10.0, 3.0, (1000, count))
    steps = np.arange(count)
    assert sum(fall((steps, row)).clear for row in rows) <= 22
    assert sum(rise((steps, row)).clear for row in rows) <= 22


@pytest.mark.parametrize("count", [6, 20, 2000])
def test_jumps_and_trends_beyond_the_noise_are_changes(count):
    rng = np.random.default_rng(0)
    steps = np.arange(count)
    shapes = {"jump": np.where(steps < count // 2, 60.0, 8.0), "trend": np.linspace(60.0, 8.0, count)}
    for shape in shapes.values():
        assert fall((steps, shape)).large
        assert fall((steps, shape + rng.normal(0, 0.5, count))).large


def test_few_values_have_no_known_noise():
    assert noise(np.array([9.0, 1.0, 1.0])) == np.inf
    assert not fall((np.arange(3), np.array([9.0, 1.0, 1.0]))).clear
    assert noise(np.full(9, 4.0)) == 0


def test_a_network_is_trained_once_most_of_the_loss_has_fallen():
    steps = np.arange(0, 1000, 10)

    def history(values):
        return {"loss/step": (steps, np.asarray(values, float))}

    assert learned(history(np.linspace(2, 1, 100))) == 800
    assert learned(history(np.where(steps < 300, 2.0, 0.1))) == 300
    assert learned(history(np.linspace(1, 2, 100))) == 0
    assert learned({"loss/step": (steps[:0], np.empty(0))}) == 0


def test_rank_that_classes_need():
    assert needed_rank(4, 1.4, 0.3) == 1.5
    assert needed_rank(2, 0.7, 0.3) == 0.5
    assert needed_rank(4, 9.0, 1.4) is None, "the loss of answers by chance"
    assert needed_rank(4, 1.4, 1.3) is None
    assert needed_rank(None, 1.4, 0.3) is None
    assert needed_rank(4, 1.4, float("nan")) is None
    assert needed_rank(4, float("nan"), 0.3) is None
