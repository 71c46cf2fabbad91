"""The data of the first chart: margins of training and test points over the steps of a run."""

import json

import numpy as np

from excite.report.margin_history import margin_history
from excite.report.view import RunView
from excite.runs import Run
from excite.runs.reader import MetricsReader


def view(path):
    metrics_reader = MetricsReader(path)
    metrics_reader.refresh()
    return RunView(metrics_reader, path.name, 0)


def test_only_runs_that_measured_margins_have_an_entry(tmp_path):
    with Run.create(tmp_path / "a", {}) as run:
        run.log(0, {"loss/step": 1.0})
    with Run.create(tmp_path / "b", {}) as run:
        for step in (0, 10, 20):
            run.log(step, {"margin_gap/median/train": 0.1 * step, "margin_gap/gap": float("nan")})
    with Run.create(tmp_path / "c", {}) as run:
        run.log(0, {"margin_gap/gap": 0.1})  # no margins: no chart
    (found,) = margin_history([view(tmp_path / name) for name in "abc"])
    assert found == {
        "run": 1,
        "train": {"x": [0, 10, 20], "y": [0, 1, 2]},
        "gap": {"x": [0, 10, 20], "y": [None, None, None]},
    }
    json.dumps(found, allow_nan=False)


def test_long_series_are_thinned_and_keep_their_extremes(tmp_path):
    values = np.full(5000, 0.5)
    values[1234], values[4321] = 0.1, 0.9
    with Run.create(tmp_path / "a", {}) as run:
        for step, value in enumerate(values):
            run.log(step, {"margin_gap/median/test": float(value)})
    (found,) = margin_history([view(tmp_path / "a")])
    assert len(found["test"]["x"]) <= 500
    assert (min(found["test"]["y"]), max(found["test"]["y"])) == (0.1, 0.9)


def test_another_number_of_points_is_no_point_of_the_curve(tmp_path):
    with Run.create(tmp_path / "a", {}) as run:
        for step, points in ((0, 64), (10, 64), (20, 500)):
            values = {
                "median/train": 0.1,
                "median/test": 0.2,
                "gap": 0.3,
                "chance": 0.4,
                "points/train": points,
                "points/test": points + 1,
            }
            run.log(step, {f"margin_gap/{name}": value for name, value in values.items()})
    (found,) = margin_history([view(tmp_path / "a")])
    assert found["points"] == 64
    assert found["train"] == {"x": [0, 10], "y": [0.1, 0.1]}
    assert found["apart"] == [{"step": 20, "points": 500, "train": 0.1, "test": 0.2, "gap": 0.3, "chance": 0.4}]
    json.dumps(found, allow_nan=False)


def test_measurements_of_as_many_points_are_one_curve(tmp_path):
    with Run.create(tmp_path / "a", {}) as run:
        for step in (0, 10):
            run.log(step, {"margin_gap/median/test": float("nan"), "margin_gap/points/test": 40.0})
        run.log(20, {"margin_gap/median/test": 1.0, "margin_gap/points/test": float("nan")})
    (found,) = margin_history([view(tmp_path / "a")])
    assert found == {"run": 0, "test": {"x": [0, 10, 20], "y": [None, None, 1]}, "points": 40, "apart": []}
