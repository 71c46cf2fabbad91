"""What is sent to a page to draw runs."""

import json
from dataclasses import replace

import numpy as np
import pytest

from excite.report import make_report
from excite.report.view import RunView, describe, draw, findings
from excite.runs import Run
from excite.runs.reader import MetricsReader


@pytest.fixture
def shown(tmp_path):
    runs = []
    for i in range(2):
        with Run.create(tmp_path / f"run{i}", {}) as run:
            for step in range(3000):
                run.log(step, {"loss/step": 1.0, "rank/share/b": 0.5, "rank/share/a": i, "signs/changed": 0.1})
        runs.append(RunView(MetricsReader(tmp_path / f"run{i}"), f"run{i}", i, order=("b", "a")))
        runs[-1].metrics_reader.refresh()
    yield runs
    for run in runs:
        run.metrics_reader.close()


def test_what_is_drawn(shown):
    assert [panel["id"] for panel in describe(shown)] == ["losses", "ranks", "signs"]
    found = draw(shown, ["rank/share", "signs/changed", "nothing"], points=100)
    assert found.keys() == {"rank/share", "signs/changed"}
    assert [(c["run"], c["layer"]) for c in found["rank/share"]["curves"]] == [(0, "b"), (0, "a"), (1, "b"), (1, "a")]
    assert all(len(c["x"]) <= 100 and c["x"][-1] == 2999 for c in found["rank/share"]["curves"])
    first, second = found["rank/share"]["maps"]
    assert first["layers"] == ["b", "a"]
    assert len(first["x"]) == len(first["z"][0]) <= 240
    np.testing.assert_allclose([first["z"][1][0], second["z"][1][0]], [0, 1])
    assert found["signs/changed"]["maps"] == []
    few = draw(shown, ["rank/share"], budget=400)["rank/share"]["curves"]
    assert sum(len(c["x"]) for c in few) <= 400
    rough = draw(shown, ["loss/step"], rough=True)["loss/step"]["curves"][0]
    assert (rough["x"][0], rough["x"][-1]) == (0, 2999)
    assert {one["run"] for one in findings(shown)} == {"run0", "run1"}
    json.dumps([found, few, rough], allow_nan=False)


def test_panels_and_sentences_say_what_layers_do(shown):
    roles = {"a": "layer 0, query", "left": "layer 9, key"}
    named = [replace(run, roles=roles) for run in shown]
    ranks = next(panel for panel in describe(named) if panel["id"] == "ranks")
    assert ranks["roles"] == {"a": "layer 0, query"}
    assert all(panel["roles"] == {} for panel in describe(shown))


def test_the_report_holds_what_the_page_draws(shown, tmp_path):
    page = make_report([run.metrics_reader.path for run in shown]).write(tmp_path / "r.html").read_text()
    text = page.partition('id="frozen">')[2].partition("</script>")[0]
    frozen = json.loads(text)
    shown = [replace(run, order=()) for run in shown]  # these runs do not know their wiring
    assert frozen["panels"] == describe(shown)
    keys = {q["key"] for panel in frozen["panels"] for q in panel["quantities"]}
    assert frozen["data"].keys() == keys
    live = draw(shown, ["rank/share"], points=500)["rank/share"]
    assert frozen["data"]["rank/share"] == live  # the same numbers as the live page at that resolution


def test_sentences_from_some_of_many_metrics_say_so(tmp_path):
    with Run.create(tmp_path / "run", {}) as run:
        for step in range(5):
            run.log(step, {"loss/step": 1.0, **{f"rank/effective/fc{i}": 9.0 - 2 * step for i in range(30)}})
        run.flush()
        metrics_reader = MetricsReader(run.path)
        metrics_reader.refresh()
        whole, some = (findings([RunView(metrics_reader, "run", 0)], limit) for limit in (None, 11))
        assert some[-1]["text"] == "This is from 11 of 31 metrics, a part of every quantity."
        assert findings([RunView(metrics_reader, "run", 0)], 31) == whole
        assert {one["text"] for one in whole} - {one["text"] for one in some}  # 27 more layers, and 7
