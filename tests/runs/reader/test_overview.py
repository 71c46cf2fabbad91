"""The values that a list of runs shows are those of the run, read with or without a writer."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

import excite
from excite.runs import Run
from excite.runs.reader import MetricsReader, overview, read_overview

NAMES = ["margin_gap/median/test", "nothing"]
SPARKS = ["margin_gap/median/test", "loss/step"]


def write(run, steps=range(1000)):
    for step in steps:
        run.log(
            step, {"loss/step": 1 / (1 + step)} | ({"margin_gap/median/test": 0.1 * step} if step % 100 == 0 else {})
        )
    run.log(
        steps[-1], {"alert/Fell/rank/effective/a": 1.0, "alert/Fell/rank/effective/b": 1.0, "alerts": 1.0, "z": 1.0}
    )


@pytest.mark.parametrize("closed", [True, False])
def test_last_values_ends_alerts_and_sparkline(tmp_path, closed):
    run = Run.create(tmp_path / "run", {})
    write(run)
    run.close() if closed else run.flush()
    found = read_overview(run.path, NAMES, SPARKS)
    assert found.step == 999
    assert found.latest == {"margin_gap/median/test": 90.0}
    assert found.loss_first == tuple(1 / (1 + step) for step in range(20))
    assert found.loss_last == tuple(1 / (1 + step) for step in range(980, 1000))
    assert found.alerts == ("alert/Fell/rank/effective/a", "alert/Fell/rank/effective/b")
    assert found.spark == ("margin_gap/median/test", tuple(0.1 * step for step in range(0, 1000, 100)))
    metrics_reader = MetricsReader(run.path)
    metrics_reader.refresh()
    assert overview(metrics_reader, NAMES, SPARKS) == found
    run.close()


def test_a_sparkline_is_evenly_spaced_and_has_both_ends(tmp_path):
    with Run.create(tmp_path / "run", {}) as run:
        write(run)
    name, values = read_overview(run.path, [], ["loss/step"]).spark
    assert name == "loss/step"
    assert len(values) == 40
    steps = np.round(1 / np.array(values) - 1)
    assert (steps[0], steps[-1]) == (0, 999)
    assert np.ptp(np.diff(steps)) <= 1


def test_runs_without_values_and_values_that_are_not_numbers(tmp_path):
    with Run.create(tmp_path / "empty", {}) as run:
        pass
    found = read_overview(run.path, NAMES, SPARKS)
    assert (found.step, found.latest, found.loss_first, found.alerts, found.spark) == (None, {}, (), (), None)
    with Run.create(tmp_path / "one", {}) as run:
        run.log(5, {"loss/step": math.nan})
    found = read_overview(run.path, ["loss/step"])
    assert math.isnan(found.latest["loss/step"])
    assert math.isnan(found.loss_last[0])
    assert found.spark is None


def test_no_query_has_numbered_placeholders():
    """Python 3.12 warns of `?1` with a tuple of values, 3.14 refuses it."""
    source = Path(excite.__file__).parent
    assert not [path for path in source.rglob("*.py") if re.search(r"= ?\?[0-9]", path.read_text(encoding="utf-8"))]
