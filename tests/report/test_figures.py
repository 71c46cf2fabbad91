"""The charts of margins: their curves are distribution functions."""

import json

import numpy as np
import pytest
import torch

from excite.margin import Margins
from excite.report.collect import collect
from excite.report.figures import margin_curves, series
from excite.runs import Run

from .conftest import make_run


def test_one_chart_per_variant_with_both_curves_and_the_gap(runs):
    variants = collect([runs])
    charts = margin_curves(variants)
    assert [chart["title"] for chart in charts] == ["plain", "excited"]
    gaps = [f"largest distance: {variant.gap():.3f}" for variant in variants]
    names = [[one["name"] for one in chart["series"]] for chart in charts]
    assert names == [["training points", "test points", gap] for gap in gaps]
    values = np.sort(variants[0].values("train"))
    curve, _, distance = charts[0]["series"]
    assert curve["y"][-1] == 1
    assert len(curve["x"]) <= 502
    at = np.searchsorted(values, np.array(curve["x"][1:-1]) + 1e-5, side="right") / len(values)
    np.testing.assert_allclose(curve["y"][1:-1], at, atol=0.01)
    assert distance["x"][0] == distance["x"][1]
    assert distance["y"][1] - distance["y"][0] == pytest.approx(variants[0].gap(), abs=1e-4)


def test_charts_are_json_whatever_the_margins(tmp_path):
    with Run.create(tmp_path / "none", {}) as run:
        run.log(0, {"loss/step": 1.0})
    assert margin_curves(collect([tmp_path / "none"])) == []
    make_run(tmp_path / "run", "one", 0.0)
    with Run.open(tmp_path / "run", "a") as run:
        values = torch.full((6,), float("inf"))
        for part in ("train", "test"):
            run.write_json(f"margins-inf-{part}", Margins(values, "inf").to_dict())
    (chart,) = margin_curves(collect([tmp_path / "run"]))
    assert chart["title"] == ""  # one variant needs no name
    assert max(chart["series"][0]["y"]) == 0  # no point is misclassified within any ε shown
    json.dumps(chart, allow_nan=False)


def test_a_long_curve_is_thinned_and_what_is_not_finite_is_a_gap():
    line = series("a", np.arange(10_000), np.where(np.arange(10_000) == 0, np.nan, 1.0), 3, dash=1)
    assert len(line["x"]) == len(line["y"]) <= 501
    assert line["x"][-1] == 9999
    assert line["y"][0] is None
    assert (line["colour"], line["dash"]) == (3, 1)
