"""Sentences of an audit."""

import numpy as np
import pytest
import torch
from torch import nn

from excite.probes import richness
from excite.report.audit import audit
from excite.report.audit.narrative import unit_counts

from .conftest import QUICK, promise


def test_a_failed_condition_leaves_no_number(folder):
    found = audit(folder, **QUICK)
    theorem = promise(found, "Persistency of excitation, Theorem 1")
    assert theorem.bound.value is None
    assert theorem.ratio is None
    assert any(sentence.startswith("No bound from") and "converged" in sentence for sentence in found.sentences)
    assert "failed: training has converged" in str(found)


def test_units_are_counted_by_what_they_lack():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    x = torch.randn(12, 3, dtype=torch.float64)
    x[:, 2] = x[:, 0] + x[:, 1]  # a direction that no point uses
    x[:4] = torch.randn(4, 3)
    with torch.no_grad():
        model[0].weight[0], model[0].bias[0] = 0.0, -1.0  # never active
        model[0].weight[1], model[0].bias[1] = 0.0, 1.0  # always
    units = richness(model, x, units=True)["0"].units
    ranks = []
    for k in range(4):
        rows = x[(x @ model[0].weight[k] + model[0].bias[k]) > 0].numpy()
        ranks.append((len(rows), np.linalg.matrix_rank(rows) if len(rows) else 0))
    by_hand = {
        "excited": sum(r == 3 for _, r in ranks),
        "never active": sum(n == 0 for n, _ in ranks),
        "too few points": sum(0 < n < 3 for n, _ in ranks),
        "too few directions": sum(n >= 3 and r < 3 for n, r in ranks),
    }
    assert unit_counts(units) == by_hand
    assert by_hand["never active"] == 1


@pytest.mark.slow
def test_the_first_line_is_that_of_the_margins(folder):
    found = audit(folder, units=False, margin_points=8)
    line = found.headline
    assert "test data" in line.text
    assert "training" in line.text
    assert line.link == "#chart-margins-inf"
    assert found.to_dict()["verdict"] == line.to_dict()
    without = audit(folder, units=False, **QUICK).headline
    assert without.text.startswith("Robustness was not measured: not requested. Layer ")
    assert without.action == f"Measure it: excite margins {folder}."


@pytest.mark.slow
def test_images_within_0_and_1_are_described_in_pixels():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    x = torch.rand(12, 1, 4, 4)
    pair = x, model(x).argmax(1)
    found = audit(model, train=pair, test=pair, units=False, margin_points=12)
    assert "/255 per pixel is enough" in found.headline.text
    assert "excite.margins(" in found.headline.action or "points of training" in found.headline.action  # no run to name
    plain = audit(nn.Sequential(model[1]), train=(x.flatten(1), pair[1]), units=False, margin_points=12)
    assert "per input value" in plain.headline.text
