"""Rules that are applied step by step, in a training, over restarts and with other rules."""

import logging
import math
import random

import pytest
import torch

import excite
from excite.monitor.alerts import (
    Above,
    AlertRaised,
    Alerts,
    Below,
    Fell,
    NotFinite,
    SteeperWhileFlat,
)
from excite.probes import Loss, Probe
from excite.runs.state import flatten, unflatten


class Given(Probe):
    name = "rank"

    def __init__(self, values):
        super().__init__()
        self.values = values

    def measure(self, ctx):
        return {"effective/fc": self.values[min(ctx.step, len(self.values) - 1)]}


def test_a_restart_changes_no_alert():
    """At any moment: nothing is said twice, and windows that a rule looks back on stay whole."""
    generator = random.Random(0)
    names = ["trajectory/mean/0", "rank/effective/fc", "loss/step"]
    rows = [{name: generator.choice([1.0, 1.0, 9.0, math.nan]) for name in names} for _ in range(60)]
    rules = [
        NotFinite(),
        Above("*", 5, measurements=2),
        Fell(measurements=2),
        SteeperWhileFlat(window=50, measurements=2, factor=1.1),
    ]
    whole = Alerts(rules)
    expected = [str(alert) for i, row in enumerate(rows) for _, alert in whole.update(10 * i, row)]
    assert len(expected) > 20
    for stop in range(len(rows)):
        first, second = Alerts(rules), Alerts(rules)
        found = [str(alert) for i, row in enumerate(rows[:stop]) for _, alert in first.update(10 * i, row)]
        second.load_state_dict(unflatten(*flatten(first.state_dict())))
        found += [str(alert) for i, row in enumerate(rows[stop:], stop) for _, alert in second.update(10 * i, row)]
        assert found == expected


def test_rules_may_change_at_a_restart():
    first = Alerts([Above("a", 2), Below("b", 2)])
    assert len(first.update(0, {"a": 3.0, "b": 1.0})) == 2
    second = Alerts([Below("b", 2, then=print), Above("a", 1), Above("a", 2, then=print)])
    second.load_state_dict(first.state_dict())
    assert [rule.limit for rule, _ in second.update(10, {"a": 3.0, "b": 1.0})] == [1]  # the new one
    third = Alerts([Above("c", 2)])
    third.load_state_dict(first.state_dict())
    assert third.state_dict() == {"history": {}, "true": []}


def test_checkpoints_hold_the_alerts_and_older_ones_load(tmp_path):
    rules = [Above("loss/step", 0), Fell(min_peak=1)]

    def watched(folder):
        return excite.watch(torch.nn.Linear(2, 1), run=folder, probes=[Loss(), Given([50, 50, 5])], alerts=rules)

    with watched(tmp_path / "a") as watch:
        watch.step(1.0)
        watch.step(1.0)
        state = watch.state_dict()
    for folder, older, expected in (("b", False, [("Fell", 4)]), ("c", True, [("Above", 3)])):
        found = {k: v for k, v in state.items() if not older or k != "alerts"}
        with watched(tmp_path / folder) as watch:
            watch.load_state_dict(found)
            watch.step(1.0)
            watch.step(1.0)
        run = excite.load_run(tmp_path / folder)
        alerts = [name for name in run.names() if name.startswith("alert/")]
        assert [(name.split("/")[1], int(run.series(name)[0][0])) for name in alerts] == expected


def test_alerts_in_a_watch_log_call_and_raise(tmp_path, caplog):
    model, called = torch.nn.Linear(2, 1), []
    rules = [Fell(), Above("loss/step", 5, then=called.append), NotFinite(then="raise")]
    with (
        caplog.at_level(logging.WARNING, logger="excite"),
        pytest.raises(AlertRaised, match="loss/step is nan") as error,
        excite.watch(model, run=tmp_path / "run", probes=[Loss(), Given([50, 50, 5])], alerts=rules) as watch,
    ):
        for step in range(70):
            watch.step(6.0 if step == 3 else math.nan if step == 30 else 1.0)
    assert error.value.alert.step == 31
    assert [alert.step for alert in called] == [4]
    assert any(line.startswith("step 4: rank/effective/fc fell from 50 to 5. Lower the") for line in caplog.messages)
    run = excite.load_run(tmp_path / "run")
    assert run.status == "failed"
    assert run.series("alert/Above/loss/step")[0].tolist() == [4]
    assert run.series("alert/Fell/rank/effective/fc")[1].tolist() == [5.0]
