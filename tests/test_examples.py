"""The notebook in examples runs from top to bottom, and is stored without outputs; configs are valid."""

import json
from pathlib import Path

import pytest

from excite.train import train
from excite.train.config import load_config

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
CONFIGS = sorted(EXAMPLES.glob("*.toml"))


def code_cells(path):
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_hold_no_outputs_and_compile(path):
    cells = code_cells(path)
    assert len(cells) > 3
    for cell in cells:
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
        compile("".join(cell["source"]), path.name, "exec")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_configs_are_valid_and_say_how_they_are_used(path):
    config = load_config(path)
    assert config.adversarial.hidden_radius > 0
    assert config.robust.radius == config.adversarial.radius
    assert f"excite train examples/{path.name} --run " in path.read_text()


@pytest.mark.slow
def test_robust_config_of_digits_trains(tmp_path):
    config = load_config(EXAMPLES / "robust_digits.toml").model_dump()
    config["data"] |= {"train": 20, "test": 10}
    config["robust"] |= {"points": 10}
    config["model"] = {"name": "small-cnn"}
    with train({**config, "epochs": 1, "batch": 10}, tmp_path / "run") as run:
        assert {"robust/train", "robust/test", "accuracy/test"} <= set(run.names())


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_run(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names = {"__name__": "__main__"}
    for cell in code_cells(path):
        exec(compile("".join(cell["source"]), path.name, "exec"), names)
    out = capsys.readouterr().out
    assert "plain: test accuracy 9" in out
    assert "excited: test accuracy 9" in out
    assert (tmp_path / "runs/tour/report.html").stat().st_size > 10_000
