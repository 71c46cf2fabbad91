"""Which metrics belong together on a page, and what is sent to draw them."""

import sys

import pytest

from excite.report.panels import PANELS, anchor, in_order, make_panels, natural, select, split


def test_every_metric_has_one_place():
    names = ["loss/step", "rank/share/fc1", "rank/effective/fc1", "trajectory/mean/0", "trajectory/label/vector", "signs/changed",
             "signs/changed/0.weight", "mine/a/b/c", "alone", "direction/norm", "alignment/aligned/0>2", "margin/median"]  # fmt: skip
    found = make_panels(names)
    ids = [panel.panel.id for panel in found]
    assert ids == ["losses", "margin", "steepness", "ranks", "alignment", "signs", "logged", "other-mine"]
    placed = [q.metric(layer) for panel in found for q in panel.quantities for layer in q.layers]
    assert sorted(placed) == sorted(set(names) - {"trajectory/label/vector"})
    assert [q.key for q in found[ids.index("ranks")].quantities] == ["rank/share", "rank/effective"]
    assert found[ids.index("signs")].quantities[0].layers == ("", "0.weight")
    assert make_panels([]) == []


def test_logged_values_without_a_slash_share_a_panel():
    found = make_panels(["lr", "val_acc", "val/acc", "grad norm"])
    assert [(panel.panel.id, [q.name for q in panel.quantities]) for panel in found] == [
        ("logged", ["grad norm", "lr", "val_acc"]),
        ("other-val", ["acc"]),
    ]
    names = [f"logged{i}" for i in range(300)] + [f"probe{i}/x" for i in range(300)]
    chosen, left_out = select(names, 250)
    assert (len(chosen), left_out) == (250, 350)
    assert sum("/" not in name for name in chosen) > 50


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
    assert select(names, 100, contains="fc4321") == ({"rank/share/fc4321"}, 0)
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


def test_the_first_chart_and_the_alerts_are_no_panels():
    names = [
        "margin_gap/median/test",
        "margin_gap/gap",
        "margin_gap/low/test",
        "margin_gap/low/train",
        "alert/Above/loss/step",
    ]
    (panel,) = make_panels(names)
    assert [(one.key, one.layers) for one in panel.quantities] == [("margin_gap/low", ("train", "test"))]
    assert select(names, 10) == ({"margin_gap/low/test", "margin_gap/low/train"}, 0)
    assert (anchor("margin_gap"), anchor("rank")) == ("#margin-history", "#panel-rank")
