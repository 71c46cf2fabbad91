"""README's examples print what README shows: words exactly, numbers within a tolerance."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
NUMBER = re.compile(r"\d+(?:\.\d+)?")
# They depend on the machine, or on the time limit, which tests do not have.
VARYING = re.compile(r" ?\(\d+(?:\.\d+)? s\)|; fewer points than \d+, for want of time|, at most [\d.e+]+ s")


def examples():
    """Code blocks in order, each with the output that README shows below it, or None."""
    pattern = r"(<!-- printed -->\n)?```python\n(.*?)```\n(?:\n```text\n(.*?)```)?"
    return [(code, shown if marked else None) for marked, code, shown in re.findall(pattern, README.read_text(), re.S)]


def differences(shown, printed):
    """What differs between two texts: other words, or numbers further apart than another machine explains."""
    shown, printed = (VARYING.sub("", " ".join(text.split())) for text in (shown, printed))
    if NUMBER.sub("#", shown) != NUMBER.sub("#", printed):
        return [f"README shows {shown!r}, printed is {printed!r}"]
    return [
        f"{match[0]} is shown, {found} printed, in {shown!r}"
        for match, found in zip(NUMBER.finditer(shown), NUMBER.findall(printed))
        if abs(float(match[0]) - float(found)) > _tolerance(shown, match)
    ]


def _tolerance(text, match):
    if text[match.end() : match.end() + 1] == "%":
        return 4
    if "." not in match[0]:  # counts of points, fewer where time runs out
        return max(3, 0.4 * float(match[0]))
    return max(0.03, 0.3 * float(match[0]))


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
    assert len(shown) == 3
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
