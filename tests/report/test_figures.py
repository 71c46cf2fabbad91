"""The figure of margins: its curves are distribution functions, and names stay text."""

import numpy as np
import torch

from excite.margin import Margins
from excite.report.collect import collect
from excite.report.figures import as_text, margin_curves
from excite.runs import Run

from .conftest import make_run


def test_what_is_shown_as_text():
    assert as_text("a <b>&amp; %{x}") == "a &lt;b&gt;&amp;amp; %\u200b{x}"


def test_one_plot_per_variant_with_both_curves_and_the_gap(runs):
    variants = collect([runs])
    figure = margin_curves(variants)
    assert [note.text for note in figure.layout.annotations][:2] == ["plain", "excited"]
    by_name = [(trace.name, trace.xaxis) for trace in figure.data]
    assert by_name == [
        (name, axis) for axis in ("x", "x2") for name in ("training data", "test data", "largest distance")
    ]
    train = np.sort(variants[0].values("train"))
    curve = figure.data[0]
    assert curve.y[-1] == 1
    at = np.searchsorted(train, curve.x, side="right") / len(train)
    np.testing.assert_allclose(curve.y[1:-1], at[1:-1])
    low, high = figure.data[2].y
    assert high - low == variants[0].gap()


def test_margins_that_were_not_reached_and_runs_without_any(tmp_path):
    with Run.create(tmp_path / "none", {}) as run:
        run.log(0, {"loss/step": 1.0})
    assert margin_curves(collect([tmp_path / "none"])) is None
    make_run(tmp_path / "run", "one", 0.0)
    with Run.open(tmp_path / "run", "a") as run:
        values = torch.full((6,), float("inf"))
        for part in ("train", "test"):
            run.write_json(f"margins-inf-{part}", Margins(values, "inf").to_dict())
    figure = margin_curves(collect([tmp_path / "run"]))
    assert max(figure.data[0].y) == 0  # no point is misclassified within any ε shown
