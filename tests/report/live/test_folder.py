"""The page among hostile runs: each is an error of its own, everything else is served, and their texts stay text."""

import asyncio
import json
import logging
import os
import shutil
from html.parser import HTMLParser
from urllib.parse import quote

import pytest
from benchmarks.live import HOSTILE, MARKUP, TARGETS, make_hostile, make_run, measure

from excite.report.live import folder
from excite.report.live.folder import NotFound, Runs

# Runs that are shown although something of them is damaged: the list reads run.json and metrics.db.
LISTED = {"fifo-config.json", "fifo-environment.json", "fifo-lock", "fifo-artifacts-wiring.json", "fifo-artifacts-summary.json",
          "bytes-for-a-name", "many-names", "deep-config", "markup"}  # fmt: skip
TAGS = {"a", "body", "br", "button", "caption", "div", "details", "h1", "h2", "head", "html", "input", "label", "li", "link", "main",
        "meta", "nav", "p", "pre", "script", "section", "span", "strong", "summary", "table", "tbody", "td", "th", "title", "tr", "ul"}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile") / "runs"
    make_run(root / "good")
    make_hostile(root)
    return root


@pytest.mark.slow
def test_each_hostile_run_is_one_row_and_one_line_of_the_log(root, serve, caplog):
    page = serve(root)
    with caplog.at_level(logging.WARNING, "excite.serve"):
        for _ in range(2):
            status, _, text = page.ask("/api/runs")
            assert status == 200
            rows = {row["id"]: row for row in json.loads(text)["runs"]}
    assert set(rows) == {"good", *HOSTILE}
    assert (rows["good"]["status"], rows["good"]["step"]) == ("done", 49)
    unreadable = {name for name, row in rows.items() if row["status"] == "unreadable"}
    assert unreadable == set(HOSTILE) - LISTED
    assert all(rows[name]["reason"] and "\n" not in rows[name]["reason"] for name in unreadable)
    assert str(root.parent) not in text
    assert sorted(record.args[0] for record in caplog.records) == sorted(unreadable)  # once, not at every list


@pytest.mark.slow
def test_whatever_is_asked_about_hostile_runs_is_answered(root, serve):
    page = serve(root)
    for name in HOSTILE:
        for target in TARGETS:
            status, _, text = page.ask(f"{target}?run={quote(name)}&key=*")
            assert status in (200, 404, 422), (name, target, status, text)
            if status != 200:
                assert len(text.strip().splitlines()) == 1
                assert "Traceback" not in text
                assert str(root.parent) not in text
    assert page.ask("/api/view?run=good&key=*")[0] == 200


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}


def test_markup_in_texts_of_a_run_stays_text(root, serve):
    page = serve(root)
    answers = {target: page.ask(f"{target}?run=markup&key=*") for target in TARGETS}
    assert {status for status, _, _ in answers.values()} == {200}
    details = json.loads(answers["/api/details"][2])
    verdict = json.loads(answers["/api/verdict"][2])["html"]
    for text in (answers["/view"][2], verdict, details["top"], details["bottom"]):
        parsed = Tags(text)
        assert parsed.tags <= TAGS
        assert not any(name.startswith("on") for name in parsed.attributes)
    for text in (details["top"], details["bottom"]):
        assert "&lt;img" in text
    for target, (_, headers, _) in answers.items():
        assert headers["content-type"].startswith("text/html" if target == "/view" else "application/json")


@pytest.mark.slow
@pytest.mark.browser
def test_nothing_of_a_hostile_run_becomes_markup_in_a_browser(root, serve, browser_page):
    served, page = serve(root), browser_page
    page.goto(f"{served.url}/view?run=markup&run=good")
    page.wait_for_selector("#chart-margins canvas")
    page.wait_for_selector("#chart-map-ranks canvas")
    page.get_by_text("Other metrics").press("Enter")
    page.wait_for_selector("#other-panels canvas")
    page.locator("#chart-map-ranks .plot").first.press("ArrowRight")  # the tooltip names a layer
    assert page.locator("img, b:not(#findings b, .tip b), [onerror]").count() == 0
    titles = page.locator("#chart-margins .chart-title").all_text_contents()
    assert any("<img src=x onerror=alert(1)>" in title for title in titles)
    assert page.locator("#summary .name").all_text_contents()[0] == MARKUP
    page.goto(served.url)
    page.wait_for_selector("#runs .status.failed")
    assert page.locator("#runs tbody tr").count() == len(HOSTILE) + 1
    assert page.locator("img, b, [onerror]").count() == 0
    assert page.problems == []


def test_runs_that_did_not_change_are_not_read_again(tmp_path, monkeypatch):
    for name in "abc":
        make_run(tmp_path / name, 3)
    reads = []
    original = folder.read_overview
    monkeypatch.setattr(folder, "read_overview", lambda path, *more: reads.append(path.name) or original(path, *more))

    def settle():  # as if nobody had written for a while
        for path in tmp_path.rglob("*"):
            os.utime(path, (1e9, 1e9))

    runs = Runs(tmp_path)
    before = runs.rows()
    assert sorted(reads) == ["a", "b", "c"]
    runs.rows()
    assert len(reads) == 6  # just written: times of files do not tell yet
    settle()
    runs.rows()
    reads.clear()
    assert runs.rows() == before
    assert reads == []
    shutil.rmtree(tmp_path / "b")
    make_run(tmp_path / "b", 7)
    assert {row.id: row.step for row in runs.rows()} == {"a": 2, "b": 6, "c": 2}
    assert reads == ["b"]
    (tmp_path / "a/run.json").write_text("{")
    assert {row.id: row.status for row in runs.rows()} == {"a": "unreadable", "b": "done", "c": "done"}
    shutil.rmtree(tmp_path / "c")
    assert {row.id for row in runs.rows()} == {"a", "b"}


def test_a_list_takes_a_bounded_time_and_the_next_one_goes_on(tmp_path, monkeypatch):
    for name in "abcd":
        make_run(tmp_path / name, 3)
    for path in tmp_path.rglob("*"):
        os.utime(path, (1e9, 1e9))
    monkeypatch.setattr(folder, "LIST_SECONDS", -1.0)  # over before it begins: one row is read
    runs = Runs(tmp_path)
    counts = [sum(row.status == "reading" for row in runs.rows()) for _ in range(5)]
    assert counts == [3, 2, 1, 0, 0]


@pytest.mark.slow
def test_very_many_metric_names(tmp_path, serve):
    make_run(tmp_path / "a")
    HOSTILE["many-names"](tmp_path / "a")
    page = serve(tmp_path)
    answer = json.loads(page.ask("/api/view?run=a&key=*")[2])
    assert answer["left_out"] == 60_000 + 21 - 2000
    shown = [quantity["key"] for panel in answer["panels"] for quantity in panel["quantities"]]
    assert {"loss/step", "rank/share"} <= set(shown)
    assert "loss/step" in answer["data"]
    found = json.loads(page.ask("/api/view?run=a&key=probe/q54321&names=q54321")[2])
    assert found["left_out"] == 0
    assert [q["key"] for panel in found["panels"] for q in panel["quantities"]] == ["probe/q54321"]
    assert found["data"]["probe/q54321"]["curves"][0]["y"] == [0.5]


@pytest.mark.slow
def test_what_the_benchmark_measures(root, serve):
    for i in range(10):
        shutil.copytree(root / "good", root / f"run{i}")
    page = serve(root)
    rows = dict(asyncio.run(measure(page.host, page.port, ["view", "markup"], clients=5, silent=3)))
    assert rows["runs, unreadable runs"] == f"{len(HOSTILE) + 11}, {len(HOSTILE) - len(LISTED)}"
    assert rows["5 clients at once, 3 idle connections"] == "20 × 200"
    assert rows["requests about 2 hostile runs"].startswith("6 × 200, 4 × 422")
    for i in range(10):
        shutil.rmtree(root / f"run{i}")


def test_links_inside_a_run_are_not_followed(tmp_path):
    root = tmp_path
    make_run(root / "a", 3)
    runs = Runs(root)
    assert runs.path("a") == root.resolve() / "a"
    os.rename(root / "a/config.json", root / "elsewhere.json")
    (root / "a/config.json").symlink_to(root / "elsewhere.json")
    with pytest.raises(NotFound):
        runs.path("a")
