"""Figures that several studies share."""

from __future__ import annotations

from pathlib import Path

import torch

from excite.margin import Margins
from excite.studies.figures import gap_figure, margin_figure, radius_figure, save
from excite.studies.study import VariantResult


def test_one_row_per_variant_and_one_dot_per_seed(tmp_path: Path) -> None:
    values = {"gap": 0.1, "margin_test": 0.2}
    numbers = [VariantResult(name, seed, values) for name in ("plain", "excited") for seed in (0, 1, 2)]
    figure = gap_figure(numbers, "title")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["plain", "excited"]
    assert [len(line.get_xdata()) for line in figure.axes[0].lines] == [3, 1, 3, 1]
    for name in ("a", "b"):
        save(gap_figure(numbers, "title"), tmp_path / name, "svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_curves_of_training_and_test_margins() -> None:
    margins = {part: Margins(torch.tensor([0.1, 0.2, 0.4]), "inf") for part in ("train", "test")}
    figure = margin_figure({"plain": [margins, margins]}, "title", "task")
    for axis in figure.axes:
        (line,) = axis.lines
        assert line.get_ydata()[0] == 0
        assert line.get_ydata()[-1] == 100


def test_automatic_radius_beside_what_it_may_cost() -> None:
    curves = {"factor": [0.001, 0.004], "cost": [0.2, 0.01], "allowed": [0.01, 0.01]}
    numbers = [VariantResult("plain", 0), *(VariantResult("auto", seed, curves=curves) for seed in (0, 1))]
    left, right = radius_figure(numbers, "title").axes
    assert [list(line.get_ydata()) for line in left.lines] == 2 * [[0.1, 0.4]]
    assert len(right.lines) == 4
