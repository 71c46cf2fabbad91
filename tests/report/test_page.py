"""The report: what it reads, what it says, what it shows in a browser."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from excite import ExciteError, RunError
from excite.margin import Margins
from excite.report import make_report
from excite.report.collect import collect
from excite.report.page import asset, table, unwrapped
from excite.report.verdict import compare, verdict
from excite.runs import Run

WIRING = {
    "layers": [{"name": "0", "kind": "linear", "in": "3", "out": "2", "parameters": 8}],
    "groups": [{"producers": ["0"], "consumers": ["2"], "channels": 2, "width": 2, "law": "channel", "why": "relu"}],
}


def make_run(folder, arm, shift, seed=0, n=200, config=None, status="done"):
    """A run with made-up margins: test margins are training margins moved by `shift`."""
    rng = np.random.default_rng(seed)
    with Run.create(folder, config or {"seed": seed % 10, "radius": shift}) as run:
        for step in range(20):
            run.log(
                step,
                {"loss/step": 1 / (step + 1), "rank/share/0": 0.5, "rank/effective/0": 2.0, "distance/relative": step},
            )
        for part, moved in (("train", 0.0), ("test", shift)):
            values = torch.tensor(np.maximum(rng.normal(1 - moved, 0.2, n), 0))
            run.write_json(f"margins-inf-{part}", Margins(values, "inf").to_dict())
        run.write_json("summary", {"arm": arm, "accuracy": {"train": 1.0, "test": 0.97}})
        run.write_json("wiring", WIRING)
        run.close(status, "because" if status == "failed" else None)
    return folder


@pytest.fixture
def runs(tmp_path):
    for seed in range(3):
        make_run(tmp_path / f"a{seed}", "plain", 0.3, seed)
        make_run(tmp_path / f"b{seed}", "excited", 0.0, seed + 10)
    return tmp_path


def test_runs_are_grouped_into_arms(runs):
    arms = collect([runs])
    assert [(arm.name, len(arm.runs)) for arm in arms] == [("plain", 3), ("excited", 3)]
    assert [row["accuracy test"] for row in table(arms)] == ["97.0% (97.0% to 97.0%)"] * 2
    assert collect([runs / "a0"])[0].runs[0].by_layer("rank/share").keys() == {"0"}


def test_a_real_difference_is_found_with_its_sign(runs):
    plain, excited = collect([runs])
    found = compare(excited, plain)
    assert found.decided
    assert found.high < 0
    assert found.difference == pytest.approx(excited.gap() - plain.gap())
    assert "the gap is smaller" in str(found)
    assert "the gap is larger" in str(compare(plain, excited))
    assert verdict([plain, excited])[0].startswith("Gap between training and test margins, smallest first: excited")


def made_up(shift, rng, runs=5, n=178):
    """An arm whose test margins are moved by about `shift` standard deviations, a little differently in every run."""
    moved = 1 - 0.2 * (shift + 0.075 * rng.normal(size=runs))
    pairs = [(rng.normal(1, 0.2, n), rng.normal(m, 0.2, n)) for m in moved]
    return SimpleNamespace(name="made up", pairs=lambda: dict(enumerate(pairs)))


@pytest.mark.slow
@pytest.mark.parametrize("shift", [0.0, 0.25, 0.5])
def test_equal_gaps_are_told_apart_in_one_case_of_twenty(shift):
    rng = np.random.default_rng(0)
    decided = sum(compare(made_up(shift, rng), made_up(shift, rng), 150).decided for _ in range(120))
    assert decided <= 13  # 5 % are 6 of 120; more than 13 would happen once in 200 times


@pytest.mark.slow
def test_different_gaps_are_told_apart():
    rng = np.random.default_rng(0)
    decided = sum(compare(made_up(0.0, rng), made_up(0.4, rng), 150).high < 0 for _ in range(60))
    assert decided >= 50


def test_runs_are_paired_by_their_seed(tmp_path):
    for seed in (0, 1, 2):
        make_run(tmp_path / f"a{seed}", "a", 0.1, seed)
    for seed in (2, 1):
        make_run(tmp_path / f"b{seed}", "b", 0.1, seed)
    found = compare(*collect([tmp_path]))
    assert found.runs == 2
    assert found.difference == 0


def test_margins_in_different_norms_are_not_compared(runs):
    with Run.open(runs / "a0", "a") as run:
        run.write_json("margins-2-train", Margins(torch.ones(5), "2").to_dict())
    assert all(m.norm == "inf" for arm in collect([runs]) for one in arm.runs for m in one.margins.values())


def test_doubts_are_said(tmp_path):
    make_run(tmp_path / "one", "one", 0.1, status="failed")
    text = " ".join(verdict(collect([tmp_path / "one"])))
    assert "without evidence that the search converged" in text
    assert "failed: because" in text
    with Run.create(tmp_path / "bare", {}) as run:
        run.log(0, {"loss/step": 1.0})
    assert "No margins were measured" in verdict(collect([tmp_path / "bare"]))[0]
    page = make_report([tmp_path / "bare"]).write(tmp_path / "bare.html").read_text()
    assert "Loss" in page
    assert 'id="summary"' not in page, "a table of dashes says nothing"


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


def test_bad_folders_are_refused(tmp_path, runs):
    with pytest.raises(RunError, match="no run folder"):
        make_report([tmp_path / "nothing"]).write(tmp_path / "r.html")
    with pytest.raises(ExciteError, match="at least one run"):
        make_report([]).write(tmp_path / "r.html")
    (runs / "a0/artifacts/margins-inf-test.json").write_text(json.dumps({"values": [1]}))
    with pytest.raises(RunError, match="does not hold margins"):
        make_report([runs]).write(tmp_path / "r.html")
    (runs / "a0/artifacts/margins-inf-test.json").write_text("{broken")
    with pytest.raises(RunError):
        make_report([runs]).write(tmp_path / "r.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        make_report([runs / "b0"]).write(tmp_path / "file/r.html")
    assert not (tmp_path / "r.html").exists()


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
