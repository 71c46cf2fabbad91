"""The pages in headless Chromium, 1400 and 400 pixels wide, light and dark: first line, first chart, every row, no sideways scrolling.

One browser and one server for the whole file. Screenshots are kept under artefacts/screenshots.
"""

import math
import os
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from excite.margin import Margins
from excite.report import make_report
from excite.report.audit import audit
from excite.runs import Run

from .conftest import CURVES, ROWS
from .live.conftest import serving

pytestmark = pytest.mark.browser

WIDTHS = (1400, 400)
WIDE_TABLES = """() => [...document.querySelectorAll(".scroll")]
    .filter((box) => !box.closest(".chart") && box.scrollWidth > box.clientWidth + 1).map((box) => box.firstElementChild.id)"""
LAYERS = [
    f"bert.encoder.layer.{i}.{part}"
    for i in range(5)
    for part in ("attention.self.query.dense", "attention.output.dense", "intermediate.dense", "output.dense")
]
EVIL = "</script><img src=x onerror=alert(1)>"


def make(path, values, config=None, status="done"):
    """A run with the metrics that `values(step)` returns at each of 40 steps."""
    with Run.create(path, config or {"lr": 0.1}) as run:
        for step in range(40):
            run.log(step, values(step))
        run.close(status)
    return path


def margins(step, scale=1.0, spread=0.02):
    """Metrics of a training with train= and test=."""
    if step % 4 and step != 39:
        return {"loss/step": scale / (step + 1)}
    grown = scale * step / 40
    values = {"median": 0.1, "low": 0.03, "censored": 0.0}
    found = {f"margin_gap/{key}/{part}": value * grown for key, value in values.items() for part in ("train", "test")}
    found["margin_gap/median/train"] += spread * grown
    found |= {f"margin_gap/accuracy/{part}": 0.9 for part in ("train", "test")}
    return {
        "loss/step": scale / (step + 1),
        **found,
        "margin_gap/gap": 0.05 + spread * grown,
        "margin_gap/chance": 0.15,
    }


def sampled(points, spread=0.02):
    """The same with the number of points: `points` while it trains, 500 at the end."""

    def values(step):
        found = margins(step, spread=spread)
        if "margin_gap/gap" in found:
            count = 500 if step == 39 else points
            found |= {f"margin_gap/points/{part}": float(count) for part in ("train", "test")}
            found["margin_gap/chance"] = 1.358 * (2 / count) ** 0.5
        return found | ({"alert/Above/loss/step": 1.0} if step == 1 else {})

    return values


def bert(step):
    ranks = {f"rank/share/{name}": 0.9 - 0.03 * i * step / 40 for i, name in enumerate(LAYERS)}
    return {
        "loss/step": 3 / (step + 1),
        **ranks,
        **{f"trajectory/mean/{name}": 0.1 + i for i, name in enumerate(LAYERS)},
    }


def diverged(step):
    loss = 2.3 if step < 20 else 10.0 ** min(16 * (step - 20), 300) if step < 38 else math.nan
    return {
        "loss/step": loss,
        "distance/relative/0": 10.0 ** (step * 5) if step < 30 else math.inf,
        "trajectory/mean/0": 0.0,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    make(root / "mlp", margins)
    make(root / "bert", bert)
    for points in (64, 32):
        make(root / f"sampled/{points}", sampled(points))
    make(root / "sampled/other", sampled(64, spread=0.05))
    make(root / "diverged", diverged)
    for i, rate in enumerate((0.01, 0.1, 0.5)):
        make(root / f"sweep/lr-{rate}", lambda step, i=i: margins(step, 1.0 + i), {"lr": rate, "batch": 64})
    make(root / "final", lambda step: {"loss/step": 1 / (step + 1)})
    make(
        root / "evil",
        lambda step: {f"rank/share/{EVIL}": 0.5, f"rank/share/{EVIL}2": 0.4, **margins(step)},
        {EVIL: EVIL},
    )
    rng = np.random.default_rng(0)
    with Run.open(root / "final", "a") as run:
        for part in ("train", "test"):
            run.write_json(f"margins-inf-{part}", Margins(torch.tensor(rng.uniform(0, 0.01, 50)), "inf").to_dict())
    return root


@pytest.fixture(scope="module")
def address(runs):
    with serving(runs) as served:
        yield served.url


@pytest.fixture(scope="module")
def page(chromium):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.set_default_timeout(60_000)  # a guard against hanging, not a measure of speed
        page.problems = []
        page.on("console", lambda said: page.problems.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        yield page
        browser.close()


@pytest.fixture
def look(page, request):
    """Opens an address at a width, waits for a selector, and checks what holds of every page; keeps a screenshot."""
    folder = Path(os.environ.get("EXCITE_ARTEFACTS", request.config.rootpath / "artefacts")) / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)

    def opened(url, name, width, wanted):
        page.problems.clear()
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme="dark" if width == 400 else "light")
        page.goto(url)
        page.wait_for_selector(wanted)
        if url.startswith("http") and "/view" in url:
            page.wait_for_selector("body[data-drawn=full]")
            page.wait_for_selector("#findings li")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(WIDE_TABLES) == []
        page.screenshot(path=folder / f"{name}-{width}.png", full_page=True)
        assert page.problems == []
        return page

    return opened


def top(page, selector):
    return page.locator(selector).bounding_box()["y"]


def report(runs, tmp_path, *names):
    return make_report([runs / name for name in names]).write(tmp_path / "report.html", "A title").as_uri()


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["report", "live"])
def test_first_line_and_first_chart(runs, address, look, tmp_path, kind, width):
    url = report(runs, tmp_path, "mlp") if kind == "report" else f"{address}/view?run=mlp"
    page = look(url, f"{kind}-mlp", width, "#chart-margin-gap canvas")
    assert len(page.locator("#verdict .line").inner_text()) > 20
    names = [curve["name"] for curve in page.evaluate(CURVES, "chart-median-margins")]
    assert names == ["training points", "test points"]
    train, test = page.evaluate(CURVES, "chart-median-margins")
    assert train["y"][-1] == pytest.approx(0.12 * 39 / 40)
    assert test["x"] == [*range(0, 40, 4), 39]
    assert [curve["name"] for curve in page.evaluate(CURVES, "chart-margin-gap")] == ["chance level", "gap"]
    assert top(page, "#verdict") < top(page, "#chart-median-margins") < top(page, "#findings") < top(page, "#panels")


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_another_sample_is_a_mark_of_its_own(runs, look, tmp_path, width):
    page = look(report(runs, tmp_path, "sampled/64"), "report-sampled", width, "#chart-margin-gap canvas")
    curves = {curve["name"]: curve for curve in page.evaluate(CURVES, "chart-median-margins")}
    assert list(curves) == ["64 training points", "500 training points", "64 test points", "500 test points"]
    assert curves["64 test points"]["x"] == list(range(0, 40, 4))
    assert curves["500 test points"]["x"] == [39]
    assert page.evaluate("document.getElementById('chart-median-margins').chart.series[1].lone") == "diamond"
    assert "no line joins them" in page.locator("#chart-median-margins .chart-note").inner_text()
    chance = {curve["name"]: curve["y"][-1] for curve in page.evaluate(CURVES, "chart-margin-gap")}
    assert chance["chance level, 500 points"] == pytest.approx(0.086, abs=0.001)
    assert chance["chance level, 64 points"] == pytest.approx(0.240, abs=0.001)
    # The first chart is not drawn again below, and training and test keep their colours.
    shown = page.locator("#panel-margin_gap select").first.locator("option").all_inner_texts()
    assert not {"median margin", "distance explained by chance"} & set(shown)
    colours = "(id) => document.getElementById(id).chart.series.map(({ name, colour }) => [name, colour])"
    assert page.evaluate(colours, "chart-margin_gap") == [["train", 0], ["test", 1]]
    assert dict(page.evaluate(colours, "chart-median-margins"))["64 test points"] == 1
    assert page.locator("#panel-other-alert").count() == 0  # alerts are sentences
    said = page.locator("#findings li").all_inner_texts()
    assert len([text for text in said if "was above its limit" in text]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("other", "bands"), [("sampled/other", 1), ("sampled/32", 0)])
def test_a_chance_level_is_right_for_every_run(runs, look, tmp_path, other, bands):
    page = look(report(runs, tmp_path, "sampled/64", other), "report-chances", 1400, "#chart-margin-gap canvas")
    names = [curve["name"] for curve in page.evaluate(CURVES, "chart-margin-gap")]
    assert names.count("chance level, 64 points") == bands
    assert names.count("chance level, 500 points") == 1  # the same for both
    assert ("differs between these runs" in page.locator("#chart-margin-gap .chart-note").inner_text()) == (not bands)
    assert [name for name in names if name.endswith("gap, 500 points")] == [
        "64, gap, 500 points",
        f"{other[8:]}, gap, 500 points",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_without_margins_over_time_the_final_curves_come_first(runs, look, tmp_path, width):
    page = look(report(runs, tmp_path, "final"), "report-final", width, "#chart-margins canvas")
    assert page.locator("#margin-history").is_hidden()
    assert len(page.evaluate(CURVES, "chart-margins")) == 3  # both curves, and their largest distance
    assert top(page, "#verdict") < top(page, "#chart-margins") < top(page, "#panels")


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_twenty_layers_are_twenty_rows_and_twenty_curves(runs, address, look, width):
    page = look(f"{address}/view?run=bert", "live-bert", width, "#chart-losses canvas")
    page.locator("#panel-ranks").scroll_into_view_if_needed()
    page.wait_for_selector("#chart-map-ranks .row")
    rows = page.evaluate(ROWS, "chart-map-ranks")
    assert len(rows) == len(set(rows)) == 20
    boxes = page.locator("#chart-map-ranks .row").evaluate_all(
        "(rows) => rows.map((row) => [row.getBoundingClientRect().top, row.scrollWidth <= row.clientWidth])"
    )
    tops = [top for top, _ in boxes]
    assert min(np.diff(tops)) >= 14  # labels do not overlap
    assert all(fits for _, fits in boxes)
    curves = page.evaluate(CURVES, "chart-ranks")
    assert {curve["name"] for curve in curves} == set(LAYERS)
    chart = page.locator("#chart-ranks")
    chart.get_by_text("Table of values").press("Enter")
    chart.locator("tbody tr").nth(19).wait_for(state="attached")  # filled when the element has opened
    assert chart.locator("tbody tr").count() == 20
    assert set(chart.locator("tbody th").all_inner_texts()) == set(LAYERS)


@pytest.mark.slow
def test_arrow_keys_zoom_and_escape(address, look):
    page = look(f"{address}/view?run=bert", "live-bert", 1400, "#chart-losses canvas")
    plot = page.locator("#chart-losses .plot")
    plot.press("End")
    assert "39" in page.locator("#chart-losses .tip").inner_text()
    plot.press("ArrowLeft")
    assert "38" in page.locator("#chart-losses .tip").inner_text()
    plot.press("+")
    assert page.locator("#chart-losses .reset").is_visible()
    plot.press("Escape")
    assert page.locator("#chart-losses .reset").is_hidden()
    page.locator("#panel-ranks").scroll_into_view_if_needed()
    page.wait_for_selector("#chart-map-ranks .row")
    page.locator("#chart-map-ranks .plot").press("ArrowDown")
    shown = page.evaluate("document.querySelectorAll('#chart-map-ranks .row')[1].title")
    assert shown in page.locator("#chart-map-ranks .tip").inner_text()
    page.locator("#chart-losses").scroll_into_view_if_needed()
    box = page.locator("#chart-losses .u-over").bounding_box()
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 50)
    page.mouse.up()
    low, high = page.evaluate("document.getElementById('chart-losses').chart.zoom")
    assert (low, high) == pytest.approx((0.2 * 39, 0.6 * 39), abs=0.6)
    page.get_by_role("button", name="Reset zoom").first.press("Enter")
    assert page.evaluate("document.getElementById('chart-losses').chart.zoom") is None


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_a_diverged_run(runs, address, look, tmp_path, width):
    page = look(report(runs, tmp_path, "diverged"), "report-diverged", width, "#chart-losses canvas")
    assert page.locator("#verdict.diverged").count() == 1
    assert "step 38" in page.locator("#chart-losses .chart-note.bad").inner_text()
    for chart in ("losses", "distances"):
        low, high = page.evaluate(f"document.getElementById('chart-{chart}').chart.y.range")
        assert math.isfinite(low)
        assert low < high
    assert page.evaluate("document.getElementById('chart-distances').chart.y.log")  # chosen by itself
    page = look(address, "list", width, "#runs .status.diverged")
    assert page.locator("#runs tr.diverged").count() == 1
    assert page.locator("#runs tr.diverged .sparkline").count() == 1


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_three_runs_with_different_learning_rates(address, look, width):
    query = "&".join(f"run=sweep%2Flr-{rate}" for rate in (0.01, 0.1, 0.5))
    page = look(f"{address}/view?{query}", "compare", width, "#differing")
    assert page.locator("#ranking tr").nth(1).locator(".name").inner_text() == "sweep/lr-0.5"
    assert page.locator("#differing tr.differs td:first-child").all_inner_texts() == ["lr"]
    page.locator("#panel-losses").scroll_into_view_if_needed()  # below the fold: loaded when it is in sight
    page.wait_for_selector("#chart-losses canvas")
    assert len(page.evaluate(CURVES, "chart-losses")) == 3
    assert len(page.evaluate(CURVES, "chart-median-margins")) == 6
    assert page.locator("#findings details").count() == 0  # words stay open
    assert len(page.locator("#findings h3").all()) == 3


@pytest.mark.slow
def test_the_list_is_sorted_from_the_keyboard(address, look):
    page = look(address, "list", 1400, "#runs .status.diverged")

    def names():
        return page.locator("#runs td.name").all_inner_texts()

    page.locator("#runs th[data-key=margin] button").press("Enter")
    assert names()[:1] == ["sweep/lr-0.5"]
    assert page.locator("#runs th[data-key=margin]").get_attribute("aria-sort") == "descending"
    page.locator("#runs th[data-key=name] button").press("Enter")
    assert names()[0] == "bert"
    assert names()[-1].startswith("sweep/")
    page.locator("#runs th[data-key=name] button").press("Space")
    assert page.locator("#runs th[data-key=name]").get_attribute("aria-sort") == "descending"


@pytest.fixture(scope="module")
def audited(tmp_path_factory):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(9)), nn.Linear(3, 1))
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    return audit(model, (x, y), margin_points=2).write(tmp_path_factory.mktemp("audit") / "audit.html").as_uri()


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_the_audit(look, audited, width):
    page = look(audited, "audit", width, "#chart-margins-inf canvas")
    assert page.locator("#verdict").bounding_box()["y"] < page.locator("canvas").first.bounding_box()["y"]
    assert len(page.evaluate(CURVES, "chart-explained")) == 10
    assert page.locator("#chart-explained .legend.scale").count() == 1  # ten layers: a scale of colours


@pytest.mark.slow
def test_markup_in_names_stays_text(runs, look, tmp_path):
    page = look(report(runs, tmp_path, "evil"), "report-evil", 400, "#chart-map-ranks .row")
    page.locator("#chart-map-ranks .plot").press("ArrowRight")
    page.locator("#chart-ranks .plot").press("ArrowRight")
    page.locator("#chart-ranks").get_by_text("Table of values").press("Enter")
    assert page.locator("img, [onerror]").count() == 0
    assert EVIL in page.locator("#chart-ranks tbody th").first.inner_text()
    assert (
        EVIL in page.locator("#chart-map-ranks .tip").inner_text()
        or EVIL in page.locator("#chart-ranks .tip").inner_text()
    )


@pytest.mark.slow
def test_a_page_can_be_printed(runs, look, tmp_path):
    page = look(report(runs, tmp_path, "mlp"), "report-mlp", 1400, "#chart-margin-gap canvas")
    assert page.pdf(format="A4").startswith(b"%PDF")
    assert page.problems == []


SHORT = "([names, limit]) => ExciteLabels.shorten(names, limit)"
TICKS = "([low, high, count, log]) => ExciteLabels[log ? 'logTicks' : 'linearTicks'](low, high, count)"


@pytest.fixture
def labels(page):
    """An empty page with the script that shortens names and chooses ticks."""
    page.goto("about:blank")
    page.add_script_tag(path=str(resources.files("excite.report") / "static/labels.js"))
    return page


@pytest.mark.slow
def test_names_are_shortened_to_different_ones(labels):
    def short(names, limit):
        return labels.evaluate(SHORT, [names, limit])

    assert short(["fc1", "fc2"], 10) == ["fc1", "fc2"]
    assert short(LAYERS[:2], 30) == ["…self.query.dense", "…output.dense"]
    for limit in (12, 16, 22, 40):
        found = short(LAYERS, limit)
        assert len(set(found)) == 20
        assert max(map(len, found)) <= limit + 4
    same = ["a" * 30 + str(i) + "b" * 30 for i in range(12)]  # no dots, and both ends agree
    assert len(set(short(same, 20))) == 12
    assert len(set(short([f"{'x.' * 50}{i}" for i in range(300)], 12))) == 300
    assert short([], 12) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("low", "high", "log"), [(0, 1, 0), (1e-300, 1e300, 1), (0.9, 1.1, 1), (3, 4, 1), (-5e9, 5e9, 0), (7, 7, 0)]
)
def test_there_are_a_few_ticks_within_the_axis(labels, low, high, log):
    ticks = labels.evaluate(TICKS, [low, high, 6, log])
    assert len(ticks) <= 13
    assert all(low * (1 - 1e-9) <= tick <= high * (1 + 1e-9) for tick in ticks) or low < 0
    assert len(ticks) >= 2 or low == high
