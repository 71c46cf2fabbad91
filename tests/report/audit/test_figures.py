"""The figures of an audit: their curves are those of the measurements."""

import numpy as np
import pytest
import torch
from torch import nn

from excite.margin import Margins
from excite.probes import richness
from excite.report.audit import figures
from excite.report.audit.lipschitz import LipschitzConstants

EVIL = "<b>a"


def test_fraction_of_the_variance_in_the_first_directions():
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module(EVIL, nn.Linear(4, 3))
    model.add_module("last", nn.Linear(3, 1))
    x = torch.randn(30, 4, dtype=torch.float64)
    layers = richness(model.double(), x)
    figure = figures.explained_variance(layers)
    assert [line["name"] for line in figure["series"]] == ["<b>a (width 4)", "last (width 3)"]  # text, never markup
    eigenvalues = np.sort(np.linalg.eigvalsh(np.cov(x.T.numpy())))[::-1]
    np.testing.assert_allclose(figure["series"][0]["y"], np.cumsum(eigenvalues) / eigenvalues.sum(), rtol=1e-5)


def test_many_layers_get_colours_along_their_depth():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9))).double()
    lines = figures.explained_variance(richness(model, torch.randn(9, 2, dtype=torch.float64)))["series"]
    assert [line["colour"]["depth"] for line in lines] == pytest.approx(np.linspace(0, 1, 9))


def test_a_layer_that_sees_only_zeros_has_no_curve():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).double()
    with torch.no_grad():
        model[0].weight.zero_(), model[0].bias.zero_()
    figure = figures.explained_variance(richness(model, torch.randn(9, 2, dtype=torch.float64)))
    assert [line["name"] for line in figure["series"]] == ["0 (width 2)"]


@pytest.mark.parametrize(("guaranteed", "lines"), [(12.0, 2), (None, 1), (float("inf"), 1)])
def test_upper_bounds_are_vertical_lines(guaranteed, lines):
    local = {"train": np.array([1.0, 3.0, 2.0]), "test": np.array([0.0, 2.0])}
    figure = figures.lipschitz_constants(
        LipschitzConstants("2", local, guaranteed, ""), {"a theorem": 9.0, "another": float("inf")}
    )
    train, test, *upper = figure["series"]
    assert train["x"] == [1, 2, 3]
    assert test["y"] == [0.5, 1]
    assert len(upper) == lines
    assert upper[0]["x"] == [9, 9]


def test_certified_margins_are_a_second_curve():
    values = torch.tensor([0.1, 0.2, float("inf"), 0.4])
    found = Margins(values, "inf", certified=values / 2)
    figure = figures.margin_curves({"test": found}, "inf")
    measured, certified = figure["series"]
    assert max(measured["y"]) == 0.75
    assert certified["name"] == "test points, certified upper bound"
    assert np.interp(0.15, certified["x"], certified["y"]) >= np.interp(0.15, measured["x"], measured["y"])
