"""Spikes and warnings in series made for them."""

import math

import numpy as np

from excite.probes.flight_recorder.history import FlightHistory
from excite.probes.flight_recorder.spikes import SpikeRule

COLUMNS = [("update", ""), ("update", "a"), ("update", "b"), ("m", "a")]


def fly(change, steps=400, rate=lambda step: 0.1, **options):
    """A history after some steps of noise that `change(step, losses, values)` changes."""
    rng = np.random.default_rng(0)
    history = FlightHistory(COLUMNS, SpikeRule(), 200, **options)
    for step in range(1, steps + 1):
        values = np.exp(0.05 * rng.standard_normal(len(COLUMNS)))
        loss, values = change(step, 2 + 0.01 * rng.standard_normal(), values * rate(step))
        history.add(step, loss, rate(step), values)
    history.finish()
    return history


def planted(step, loss, values):
    if 290 <= step < 310:
        values[2] *= 8
    return (loss + 3 if 300 <= step < 310 else loss), values


def test_a_spike_is_reported_once_with_curves():
    history = fly(planted)
    (event,) = history.events
    assert event.step == 304  # five losses in a row above the limit
    assert (event.first.quantity, event.first.layer, event.first.step, event.first.lead) == ("update", "b", 290, 10)
    steps = event.curves["step"]
    assert (steps[0], steps[-1]) == (204, 334)
    assert set(event.curves) == {"step", "loss", "update", "update/b"}
    assert all(len(one) == len(steps) for one in event.curves.values())


def test_a_warning_comes_before_the_spike():
    history = fly(planted)
    warning, spike = history.messages
    assert "update of b is" in warning
    assert int(warning.split()[1].strip(":")) < 300
    assert "the loss spiked at step 304" in spike
    assert not any("may spike" in one for one in fly(planted, warn=False).messages)


def test_quiet_trainings_are_silent():
    history = fly(lambda step, loss, values: (loss, values), steps=1000)
    assert (history.events, history.messages) == ([], [])


def test_a_learning_rate_schedule_moves_nothing():
    history = fly(
        lambda step, loss, values: (loss, np.append(values[:3], 1.0)), rate=lambda step: 0.1 if step < 250 else 1.0
    )
    assert (history.events, history.messages) == ([], [])


def test_a_training_that_breaks_down_is_one_spike():
    history = fly(lambda step, loss, values: (math.nan if step > 300 else loss, values))
    (event,) = history.events
    assert event.step == 301


def test_losses_that_are_never_known_are_no_spike():
    history = fly(lambda step, loss, values: (math.nan, values))
    assert history.events == []


def test_the_head_that_grew_is_named():
    history = FlightHistory(COLUMNS, SpikeRule(), 200)
    history.add_heads(50, {"a/head0": 3.0, "a/head1": 4.0})
    history.add_heads(100, {"a/head0": 9.0, "a/head1": 4.5})
    for step in range(1, 200):
        history.add(step, 2.0 if step < 150 else 9.0, 0.1, np.ones(4))
    history.finish()
    assert history.events[0].head == ("a/head0", 3.0, 9.0)
