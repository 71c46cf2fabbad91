"""The report: what it reads, what it says, what it shows in a browser."""

import math
from importlib.resources import files

import pytest

from excite.report import make_report
from excite.report.page import SCRIPTS, asset

from .conftest import CURVES, make_run


def test_the_scripts_of_a_page_are_small_and_carry_their_licence():
    assert sum(len(asset(name)) for name in SCRIPTS) < 130_000
    folder = files("excite.report") / "static"
    assert "MIT License" in (folder / "uplot-LICENSE.txt").read_text()
    assert "uPlot" in asset("uplot.js")[:100]


def test_names_from_runs_are_escaped(tmp_path):
    evil = "</script><img src=x onerror=alert(1)>"
    make_run(tmp_path / "run", evil, 0.1, config={evil: evil})
    html = make_report([tmp_path / "run"]).write(tmp_path / "r.html", evil).read_text()
    assert evil not in html
    assert "<img src=x" not in html


@pytest.mark.slow
@pytest.mark.browser
def test_the_report_in_a_browser(runs, tmp_path, browser_page):
    path = make_report([runs]).write(tmp_path / "report.html", "A title")
    browser_page.goto(path.as_uri())
    browser_page.wait_for_selector("#chart-margins canvas")
    assert browser_page.title() == "A title"
    for chart, count in {"margins": 6, "ranks": 2, "losses": 6, "distances": 6}.items():
        curves = browser_page.evaluate(CURVES, f"chart-{chart}")
        assert len(curves) == count
        assert all(len(curve["y"]) > 1 for curve in curves)
    assert "Most robust of 2: excited" in browser_page.locator("#verdict").inner_text()
    assert browser_page.locator("#ranking tr").count() == 3
    assert browser_page.locator("#sentences li").count() >= 2
    assert "excited" in browser_page.locator("#summary").inner_text()
    assert browser_page.locator("#wiring tr").count() == 2
    assert browser_page.locator("#differing tr.differs").count() >= 1
    width = browser_page.evaluate("document.documentElement.scrollWidth")
    assert width <= 1200
    assert browser_page.problems == []
    assert [url for url in browser_page.requests_made if not url.startswith(("file:", "data:"))] == []
    assert math.isfinite(width)
