"""The notebook in examples runs from top to bottom, and is stored without outputs."""

import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


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
