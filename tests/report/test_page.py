"""The report: what it reads, what it says, what it shows in a browser."""

import math

import pytest

from excite.report import make_report
from excite.report.page import asset, unwrapped

from .conftest import make_run


def test_plotly_is_unwrapped_if_it_looks_as_expected():
    script = asset("plotly.js")
    assert script.startswith("/**")
    assert "license" in script[:300].lower()
    assert "module.exports = factory()" not in script
    assert script.index('"use strict";') < 400
    assert unwrapped("something else") == "something else"


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
    browser_page.wait_for_selector("#chart-margins .scatterlayer .trace")
    assert browser_page.title() == "A title"
    for chart, traces in {"margins": 6, "ranks": 2, "losses": 6, "distances": 6}.items():
        lines = browser_page.locator(f"#chart-{chart} .scatterlayer .trace path.js-line")
        assert lines.count() == traces
        assert all(len(lines.nth(i).get_attribute("d")) > 10 for i in range(traces))
    assert browser_page.locator("#verdict li").count() >= 2
    assert "excited" in browser_page.locator("#summary").inner_text()
    assert browser_page.locator("#wiring tr").count() == 2
    assert browser_page.locator("#settings tr.differs").count() >= 1
    width = browser_page.evaluate("document.documentElement.scrollWidth")
    assert width <= 1200
    assert browser_page.problems == []
    assert [url for url in browser_page.requests_made if not url.startswith(("file:", "data:"))] == []
    assert math.isfinite(width)
