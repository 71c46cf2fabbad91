"""The time that measuring takes from training."""

from types import SimpleNamespace

import pytest

import excite
from excite.probes import Probe
from models import build


def test_share_is_the_slow_down_of_training_only(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("excite.monitor.watcher.clock.time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Sleeps(Probe):
        name = "sleeps"

        def measure(self, ctx):
            clock[0] += 0.5 if ctx.step == 0 else 0.01
            return {}

    model, x = build("mlp")
    with excite.watch(model, x, probes=[Sleeps()], alerts=[]) as watch:
        assert watch.share == 0  # what was measured before training is not part of it
        for _ in range(10):
            clock[0] += 0.03
            watch.step()
        assert watch.share == pytest.approx(0.25)
