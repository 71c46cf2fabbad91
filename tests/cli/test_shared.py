"""What several commands use."""

from types import SimpleNamespace

import pytest

from excite import InputError
from excite.cli import shared
from excite.cli.shared import parse_normalize, parse_options


def test_bars_are_updated_by_phase(capsys):
    with shared.progress_bars() as progress:
        progress("training", 1, 4)
        progress("measuring", 2, 2)
    out = capsys.readouterr().out
    assert "training" in out
    assert "25 %" in out
    assert "100 %" in out


def test_the_summary_has_a_row_per_variant(capsys, monkeypatch):
    monkeypatch.setattr(shared.console, "_width", 140)
    row = {
        "arm": "plain [a]",
        "runs": "3",
        "accuracy test": "90 %",
        "margin train": "1",
        "margin test": "2",
        "gap": "3",
    }
    line = SimpleNamespace(kind="diverged", text="Diverged [b].", action="Lower the learning rate.")
    shared.print_summary(SimpleNamespace(rows=[row], sentences=["The gap is 3."], headline=line))
    out = capsys.readouterr().out
    assert "plain [a]" in out  # names are not markup
    assert "• The gap is 3." in out


def test_the_text_of_options_and_of_a_normalization():
    assert parse_options('{"width": 64, "names": ["a"]}') == {"width": 64, "names": ["a"]}
    assert parse_normalize("0.5,0.4,0.3/0.2,0.2,0.1") == ([0.5, 0.4, 0.3], [0.2, 0.2, 0.1])
    for text in ("0.5", "0.5/", "a/b", "1/2/3", ""):
        with pytest.raises(InputError, match="--normalize: expected MEAN/STD"):
            parse_normalize(text)
    for text in ("width=5", "[1]", "3", ""):
        with pytest.raises(InputError, match="--options: expected"):
            parse_options(text)
