"""examples/own_model.py: a model of one's own from the training to the three commands; and files of weights."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import excite as package

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def own_model(monkeypatch):
    """The example as the module that it says it is, on a few digits."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    load = package.data.load
    monkeypatch.setattr(package.data, "load", lambda name, **options: load(name, train=30, test=20, **options))
    import own_model

    yield own_model
    sys.modules.pop("own_model", None)


@pytest.fixture
def run(own_model, tmp_path, capsys):
    """The example's run with a short training, in the folder that the commands see."""
    own_model.main(own_model.Config(width=3, epochs=2, batch=10), tmp_path / "runs/own-model")
    capsys.readouterr()
    return tmp_path / "runs/own-model"


@pytest.mark.slow
def test_the_three_commands(excite, refused, run):
    stored = package.load_run(run)
    assert stored.config["config"] == {"width": 3, "lr": 0.2, "epochs": 2, "batch": 10, "seed": 0}
    assert stored.series("test/accuracy")[0].tolist() == [3, 6]
    assert stored.series("epoch")[1].tolist() == [1, 2]
    refused("its model is built by calling 'own_model:Net', which may run any code: pass --trust", "margins", run)
    status, out, err = excite("margins", run, "--trust", "--steps", "5")
    assert status == 0, err
    assert out.count("unit: pixels from 0 to 1; median: ") == 2
    assert "gap between the curves" in out
    assert f"stored in: {run / 'artifacts'}" in out
    status, out, err = excite("margins", run, "--model", "own_model:Net", "--steps", "3", "--points", "4")
    assert status == 0, err  # with the stored options
    assert "not stored: the run has margins of more points (30)" in out
    status, out, err = excite("audit", run, "--trust", "--no-units", "--out", run.parent / "audit.html")
    assert status == 0, err
    assert json.loads((run / "artifacts/audit.json").read_text())["step"] == 6
    status, out, err = excite("report", run, "--out", run.parent / "report.html")
    assert status == 0, err
    assert "test/accuracy" in (run.parent / "report.html").read_text()


@pytest.mark.slow
def test_other_data(excite, refused, run, tmp_path):
    x, y = torch.rand(6, 1, 8, 8), torch.arange(6)
    np.savez(tmp_path / "other.npz", x_train=x, y_train=y)
    options = ["--trust", "--data", tmp_path / "other.npz", "--steps", "3"]
    status, out, err = excite("margins", run, *options)
    assert status == 0, err
    assert "not stored: measured on other data than the run's own" in out
    assert "unit: that of the inputs, whose range is not known" in out
    assert "unit: pixels from 0 to 1" in excite("margins", run, *options, "--bounds", "0", "1")[1]
    refused("data: expected a dataset", "margins", run, "--trust", "--data", "nothing")
    refused("there is no file", "margins", run, "--trust", "--data", "none.npz")


def test_a_file_of_weights(excite, refused, own_model, tmp_path):
    torch.manual_seed(0)
    torch.save(own_model.Net(5).state_dict(), tmp_path / "w.pt")
    pixels = torch.rand(8, 1, 8, 8)
    np.savez(tmp_path / "d.npz", x_test=(pixels - 0.5) / 0.25, y_test=own_model.Net(5).eval()(pixels).argmax(1))
    bare = ["margins", tmp_path / "w.pt", "--data", tmp_path / "d.npz", "--steps", "3"]
    built = [*bare, "--model", "own_model:Net"]
    status, out, err = excite(*built, "--options", '{"width": 5}', "--normalize", "0.5/0.25")
    assert status == 0, err
    assert "unit: pixels from 0 to 1; median: " in out
    assert "not stored: a file of weights is not a run" in out
    refused("does not fit the Net: of another shape conv.weight (5, 1, 3, 3) instead of (16, 1, 3, 3)", *built)
    refused("does not say how to build its model", *bare)
    refused("--options: expected JSON", *built, "--options", "width=5")
    refused("--options: expected keyword arguments", *built, "--options", "[5]")
    refused("--normalize: expected MEAN/STD", *built, "--normalize", "0.5")
    refused("cannot import 'nowhere'", *bare, "--model", "nowhere:Net")
    refused("a file of weights has no data", "audit", tmp_path / "w.pt", "--model", "own_model:Net")


def test_a_malicious_file_of_weights(refused, own_model, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'executed'}",)

    torch.save({"conv.weight": Evil()}, tmp_path / "w.pt")
    for command in ("margins", "audit"):
        refused(
            "is refused: it holds something else than tensors",
            command,
            tmp_path / "w.pt",
            "--model",
            "own_model:Net",
            "--data",
            "digits",
        )
    assert not (tmp_path / "executed").exists()
