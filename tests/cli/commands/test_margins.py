"""`excite margins`"""

import json

import pytest
import torch
from torch import nn

from excite import watch


def test_margins_of_a_small_run_are_printed_and_stored(excite, small_run, tmp_path):
    status, out, err = excite("margins", "runs/small", "--points", "3", "--steps", "5")
    assert status == 0, err
    assert "gap between the curves" in out
    assert "stored in: runs/small/artifacts" in out
    assert len(json.loads((tmp_path / "runs/small/artifacts/margins-inf-train.json").read_text())["values"]) == 3


@pytest.mark.slow
def test_another_norm_a_figure_and_a_checkpoint(excite, trained, tmp_path):
    status, out, _ = excite("margins", "runs/first", "--norm", "2", "--points", "10", "--figure", "curve.png")
    assert status == 0
    assert "gap between the curves" in out
    assert (tmp_path / "curve.png").stat().st_size > 5000
    checkpoint = next((tmp_path / "runs/first/checkpoints").glob("final-*"))
    assert excite("margins", checkpoint, "--points", "5")[0] == 0
    summary = json.loads((tmp_path / "runs/first/artifacts/summary.json").read_text())
    assert summary["arm"] == "first"
    assert len(json.loads((tmp_path / "runs/first/artifacts/margins-inf-train.json").read_text())["values"]) == 40


@pytest.mark.slow
def test_margins_of_all_layers_lie_beside_those_of_the_input(excite, trained, tmp_path):
    assert excite("margins", "runs/first", "--points", "6")[0] == 0
    status, out, _ = excite("margins", "runs/first", "--points", "6", "--layers", "all", "--steps", "20")
    assert status == 0
    assert "gap between the curves" in out
    folder = tmp_path / "runs/first/artifacts"
    all_layers = json.loads((folder / "layer-margins-inf-test.json").read_text())
    assert all_layers["layers"] != "input"
    assert json.loads((folder / "margins-inf-test.json").read_text())["layers"] == "input"
    assert max(all_layers["values"]) < max(json.loads((folder / "margins-inf-test.json").read_text())["values"])
    status, _, error = excite("margins", "runs/first", "--layers", "nowhere")
    assert status == 1
    assert "nowhere" in error
    status, _, error = excite("margins", "runs/first", "--relative")
    assert status == 1
    assert "relative" in error


def test_bad_input_is_refused(refused, small_run):
    refused("no run folder at nowhere", "margins", "nowhere")
    refused("unknown norm '3'", "margins", "runs/small", "--norm", "3")
    refused("ends in .png, .svg or .pdf", "margins", "runs/small", "--figure", "a.xyz")


@pytest.mark.slow
def test_a_run_without_weights_prints_what_it_measured(excite, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    x, model = torch.rand(20, 3), nn.Linear(3, 2)
    y = model(x).argmax(1)
    with watch(model, train=(x, y), test=(x[:10], y[:10]), run="runs/watched", alerts=[]) as watched:
        watched.step(1.0)
    status, out, err = excite("margins", "runs/watched")
    assert status == 0, err
    assert "margins of 20 points" in out
    assert "margins of 10 points" in out
    assert "gap between the curves" in out
    assert "measured at the end of the training; to measure more: there is no checkpoint in runs/watched" in " ".join(
        out.split()
    )
    refused("there is no checkpoint in runs/watched", "margins", "runs/watched", "--norm", "2")
    refused("there is no checkpoint in runs/watched", "margins", "runs/watched", "--points", "5")
