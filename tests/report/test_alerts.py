"""Alerts of a run: one line for all layers with the same finding, with what to do."""

import numpy as np
import pytest

from excite.report.alerts import group_keys, grouped
from excite.report.view import RunView, findings, run_findings
from excite.runs import Run
from excite.runs.reader import MetricsReader

TWELVE = {f"alert/Fell/rank/effective/layer.{i}": 100 + 10 * (i % 3) for i in range(12)}


def groups(alerts):
    series = {name: (np.array([step]), np.ones(1)) for name, step in alerts.items()}
    return grouped(["loss/step", *series], lambda name: series[name])


def test_twelve_layers_are_one_line():
    (one,) = groups(TWELVE)
    assert one.text.startswith("Effective rank collapsed in 12 layers: ")
    assert "and 9 more (steps 100 to 120)." in one.text
    assert (one.finding().text, one.finding().panel, one.finding().docs) == (one.text, "ranks", "alerts.md#what-to-do")
    assert one.finding().action.startswith("Lower the learning rate")


def test_each_rule_and_quantity_is_a_group_in_the_order_of_time():
    found = groups(TWELVE | {"alert/NotFinite/loss/step": 7, "alert/Mine/own": 300, "alert/Above/mine/q/a": 400})
    assert [(one.rule, one.key) for one in found] == [
        ("NotFinite", "loss/step"), ("Fell", "rank/effective"), ("Mine", "own"), ("Above", "mine/q"),
    ]  # fmt: skip
    assert "was not finite (step 7)." in found[0].text
    assert found[2].text == "Mine: Own (step 300)."
    assert found[3].text == "Mine/q was above its limit in layer a (step 400)."
    assert all(one.finding().action for one in found)
    assert len(group_keys([*TWELVE, "alert/NotFinite/loss/step", "loss/step"])) == 2


@pytest.mark.parametrize("name", ["alert/", "alert/x", "alert//", "alert/Fell/"])
def test_names_that_are_no_alerts_are_left_out(name):
    assert groups({name: 1}) == []
    assert group_keys([name]) == []


def test_alerts_are_among_the_findings_unless_one_says_it(tmp_path):
    with Run.create(tmp_path / "run", {}) as run:
        for step in range(0, 400, 10):
            run.log(step, {"loss/step": 1.0, "rank/effective/a": 60.0 if step < 200 else 8.0})
        run.log(210, {"alert/Fell/rank/effective/a": 8.0, "alert/Above/own/q": 3.0})
    metrics_reader = MetricsReader(run.path)
    metrics_reader.refresh()
    found = findings([RunView(metrics_reader, "run", 0)])
    assert [one["link"] for one in found if one["kind"] == "warning"] == ["#panel-other-own", "#panel-ranks"]
    assert found[1]["docs"] == "docs/richness.md#quantities-of-a-layer"
    assert found[1]["action"].startswith("Lower the learning rate")
    assert [finding.text for finding in run_findings(RunView(metrics_reader, "run", 0))] == [
        one["text"] for one in found
    ]


def test_roles_are_named_behind_layers():
    (one,) = groups({"alert/Fell/rank/effective/h.0.mlp": 7})
    assert one.finding({"h.0.mlp": "layer 0, MLP in"}).text == (
        "Effective rank collapsed in layer h.0.mlp (layer 0, MLP in) (step 7)."
    )
