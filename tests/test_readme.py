"""README's examples print what README shows: words exactly, numbers within a tolerance."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
NUMBER = re.compile(r"\d+(?:\.\d+)?")
VARYING = re.compile(r" ?\(\d+(?:\.\d+)? s\)|; fewer points than \d+, for want of time")  # depend on the machine


def examples():
    """Code blocks in order, each with the output that README shows below it, or None."""
    pattern = r"(<!-- printed -->\n)?```python\n(.*?)```\n(?:\n```text\n(.*?)```)?"
    return [(code, shown if marked else None) for marked, code, shown in re.findall(pattern, README.read_text(), re.S)]


def differences(shown, printed, relative=0.4, absolute=0.03):
    """What differs between two texts: other words, or numbers further apart than rounding on another machine explains."""
    shown, printed = (VARYING.sub("", " ".join(text.split())) for text in (shown, printed))
    if NUMBER.sub("#", shown) != NUMBER.sub("#", printed):
        return [f"README shows {shown!r}, printed is {printed!r}"]
    pairs = [(float(a), float(b)) for a, b in zip(NUMBER.findall(shown), NUMBER.findall(printed))]
    units = [_unit(shown, match) for match in NUMBER.finditer(shown)]
    return [
        f"{a} is shown, {b} printed, in {shown!r}"
        for (a, b), unit in zip(pairs, units)
        if abs(a - b) > max(absolute * unit, relative * max(abs(a), abs(b)))
    ]


def _unit(text, match):
    """Percentages are compared as fractions; counts may differ by a few points."""
    return 100 if text[match.end() : match.end() + 1] == "%" or "." not in match[0] else 1


def test_differences_are_found():
    assert differences("median 0.20, 98.1%", "median 0.21,\n97.5%") == []
    assert differences("took (8.0 s) at 500 points", "took (19.3 s) at 500 points") == []
    assert differences("median 0.20", "median 0.40") != []
    assert differences("accuracy 98.1%", "accuracy 60.0%") != []
    assert differences("agree at 177 of 177", "agree at 175 of 177") == []
    assert differences("agree at 177 of 177", "agree at 100 of 177") != []
    assert differences("the search worked", "not to be trusted") != []


def test_readme_shows_outputs():
    shown = [output for _, output in examples() if output is not None]
    assert len(shown) == 2
    assert all("\n" in output for output in shown)


@pytest.mark.slow
def test_the_examples_of_readme_print_what_it_shows(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for code, shown in examples():
        exec(compile(code, "README.md", "exec"), names)
        out, err = capfd.readouterr()
        if shown is not None:
            assert differences(shown, out + err) == []
