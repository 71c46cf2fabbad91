"""Which metrics belong together on a page, and what is sent to draw them."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from excite.report import make_report
from excite.report.panels import PANELS, in_order, make_panels, natural, select, split
from excite.report.view import RunView, describe, draw, findings
from excite.runs import Run
from excite.runs.reader import MetricsReader


def test_every_metric_has_one_place():
    names = ["loss/step", "rank/share/fc1", "rank/effective/fc1", "trajectory/mean/0", "trajectory/label/vector", "signs/changed",
             "signs/changed/0.weight", "mine/a/b/c", "alone", "direction/norm", "alignment/aligned/0>2", "margin/median"]  # fmt: skip
    found = make_panels(names)
    ids = [panel.panel.id for panel in found]
    assert ids == ["losses", "margin", "steepness", "ranks", "alignment", "signs", "other-alone", "other-mine"]
    placed = [q.metric(layer) for panel in found for q in panel.quantities for layer in q.layers]
    assert sorted(placed) == sorted(set(names) - {"trajectory/label/vector"})
    assert [q.key for q in found[ids.index("ranks")].quantities] == ["rank/share", "rank/effective"]
    assert found[ids.index("signs")].quantities[0].layers == ("", "0.weight")
    assert make_panels([]) == []


def test_quantities_of_two_probes_in_one_panel_keep_apart():
    (panel,) = make_panels(["trajectory/mean/0", "lipschitz/mean", "lipschitz/max"])
    assert [(q.key, q.name) for q in panel.quantities] == [
        ("trajectory/mean", "steepness at training points (trajectory)"),
        ("lipschitz/mean", "steepness at training points (lipschitz)"),
        ("lipschitz/max", "steepest training point"),
    ]


def test_a_step_has_no_axis_in_common_with_a_steepness():
    (panel,) = make_panels(["trajectory/tau/0", "trajectory/phi/0", "trajectory/max/0"])
    assert [(q.key, q.layers) for q in panel.quantities] == [
        ("trajectory/max", ("0",)),
        ("trajectory/phi", ("0",)),
        ("trajectory/tau", ("0",)),
    ]


def test_layers_are_in_the_order_of_execution_then_of_numbers():
    assert in_order(["b10", "b2", "", "a"], ["b10", "b2"]) == ("", "b10", "b2", "a")
    assert in_order(["layer10", "layer2", "layer²"]) == ("layer2", "layer10", "layer²")
    assert sorted(["fc10", "fc9"], key=natural) == ["fc9", "fc10"]
    assert split("a/b/c/d") == ("a", "b", "c/d")


def test_ids_are_unique():
    assert len({panel.id for panel in PANELS}) == len(PANELS)
    probes = [probe for panel in PANELS for probe in panel.probes]
    assert len(set(probes)) == len(probes)


@pytest.fixture
def shown(tmp_path):
    runs = []
    for i in range(2):
        with Run.create(tmp_path / f"run{i}", {}) as run:
            for step in range(3000):
                run.log(step, {"loss/step": 1.0, "rank/share/b": 0.5, "rank/share/a": i, "signs/changed": 0.1})
        runs.append(RunView(MetricsReader(tmp_path / f"run{i}"), f"run{i}", i, order=("b", "a")))
        runs[-1].follower.refresh()
    yield runs
    for run in runs:
        run.follower.close()


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


def test_the_report_holds_what_the_page_draws(shown, tmp_path):
    page = make_report([run.follower.path for run in shown]).write(tmp_path / "r.html").read_text()
    text = page.partition('id="frozen">')[2].partition("</script>")[0]
    frozen = json.loads(text)
    shown = [replace(run, order=()) for run in shown]  # these runs do not know their wiring
    assert frozen["panels"] == describe(shown)
    keys = {q["key"] for panel in frozen["panels"] for q in panel["quantities"]}
    assert frozen["data"].keys() == keys
    live = draw(shown, ["rank/share"], points=500)["rank/share"]
    assert frozen["data"]["rank/share"] == live  # the same numbers as the live page at that resolution


def test_a_page_shows_a_part_of_very_many_metrics():
    names = [f"rank/share/fc{i}" for i in range(5000)] + [
        "loss/step",
        "rank/share",
        *(f"rank/unit/fc1/{i}" for i in range(999)),
    ]
    chosen, left_out = select(names, 100, order=("fc77",))
    assert len(chosen) == 100
    assert left_out == 5002 - 100  # those that no panel draws do not count
    assert {"loss/step", "rank/share", "rank/share/fc77", "rank/share/fc0", "rank/share/fc9"} <= chosen
    assert select(names, 100, part="fc4321") == ({"rank/share/fc4321"}, 0)
    assert select(names, 10_000) == (set(names[:5002]), 0)
    many = [f"mine{i}/value" for i in range(1000)] + [f"loss/q{i}" for i in range(300)]
    chosen, left_out = select(many, 500)
    assert set(many[1000:]) <= chosen
    assert len({split(name)[0] for name in chosen}) == 101
    assert left_out == 900


@pytest.mark.parametrize("form", ["rank/share/fc{}", "mine/q{}", "p{}/q", "rank/unit/fc/{}", "{}"])
def test_as_many_calls_as_names(form):
    """Work grows with the number of names, not with its square: counted by calls."""

    def calls(count):
        made = 0

        def counted(frame, event, argument):
            nonlocal made
            made += event in ("call", "c_call")

        names = [form.format(i) for i in range(count)]
        sys.setprofile(counted)
        try:
            make_panels(names)
            make_panels(select(names, 200)[0])
        finally:
            sys.setprofile(None)
        return made

    assert calls(2000) < 8 * calls(500) + 1000


def test_sentences_from_some_of_many_metrics_say_so(tmp_path):
    with Run.create(tmp_path / "run", {}) as run:
        for step in range(3):
            run.log(step, {"loss/step": 1.0, **{f"rank/effective/fc{i}": 9.0 - 4 * step for i in range(30)}})
        run.flush()
        follower = MetricsReader(run.path)
        follower.refresh()
        whole, some = (findings([RunView(follower, "run", 0)], limit) for limit in (None, 11))
        assert some[-1]["text"] == "This is from 11 of 31 metrics, a share of every quantity."
        assert findings([RunView(follower, "run", 0)], 31) == whole
        assert {one["text"] for one in whole} - {one["text"] for one in some}  # 27 more layers, and 7
