"""The rule of spikes and the order of movers, on series made for it."""

import math

import numpy as np
import pytest

from excite.probes.flight_recorder.spikes import SpikeRule, first_movers


def quiet(n, seed=0, level=2.0):
    return list(level + 0.01 * np.random.default_rng(seed).standard_normal(n))


def test_rule_is_min_above_mean_and_six_deviations():
    rule, losses = SpikeRule(), quiet(100)
    limit = np.mean(losses) + max(0.05, 6 * np.std(losses))
    assert rule.limit([*losses, *[9.0] * 5]) == pytest.approx(limit)
    assert rule.spikes([*losses, *[limit + 1e-6] * 5])
    assert not rule.spikes([*losses, *[limit - 1e-6] * 5])
    assert not rule.spikes([*losses, 9, 9, 9, 9, 2.0])  # one of the last five is low
    assert not rule.spikes([*losses, 9.0])


def test_few_losses_are_no_spike_and_nan_is_one():
    assert not SpikeRule().spikes([2.0] * 20 + [50.0] * 5)
    assert SpikeRule().spikes([2.0, math.nan])
    assert not SpikeRule().spikes([])


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_spike(seed):
    losses = quiet(2000, seed)
    assert not any(SpikeRule().spikes(losses[:n]) for n in range(2000 - 300, 2000))


def test_movers_are_ordered_by_their_first_step():
    rng, n, at = np.random.default_rng(0), 200, 195
    steps, table = np.arange(n), np.exp(0.05 * rng.standard_normal((n, 4)))
    losses = 2 + 0.01 * rng.standard_normal(n)
    losses[190:] += 2
    table[185:, 2] *= 10  # first
    table[188:, 0] *= 10
    table[160, 1] *= 10  # one step alone is an outlier
    columns = [("gradient", "a"), ("update", "a"), ("update", "b"), ("m", "b")]
    first, second = first_movers(steps, losses, table, columns, at)
    assert (first.quantity, first.layer, first.step, first.lead) == ("update", "b", 185, 5)
    assert first.times == pytest.approx(10, rel=0.3)
    assert (second.layer, second.step) == ("a", 188)


def test_a_series_that_becomes_infinite_has_moved():
    n = 200
    steps, losses, table = np.arange(n), np.full(n, 2.0), np.ones((n, 1))
    losses[195:], table[193:, 0] = math.nan, math.inf
    (mover,) = first_movers(steps, losses, table, [("gradient", "a")], 195)
    assert (mover.step, mover.lead, mover.times) == (193, 2, math.inf)


def test_a_short_history_has_no_movers():
    assert first_movers(np.arange(10), np.ones(10), np.ones((10, 1)), [("m", "a")], 9) == []
