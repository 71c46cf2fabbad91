"""What several commands use."""

from types import SimpleNamespace

from excite.cli import shared


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
