"""The live page in headless Chromium, while a real training goes on. Screenshots are kept under artefacts/screenshots."""

import multiprocessing
import os
import signal
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import excite
from excite.probes import Distance, Every, Loss, Rank
from excite.runs import Run, load_run

from ..conftest import CURVES, ROWS

pytestmark = pytest.mark.browser

COLUMNS = "() => [...document.querySelectorAll('#chart-map-ranks > div')].map((one) => one.chart.spec.x.length)"


def lengths(page, chart):
    return [len(curve["x"]) for curve in page.evaluate(CURVES, chart)]


@pytest.fixture
def keep(request):
    """Saves a screenshot of the whole page under a name."""
    folder = Path(os.environ.get("EXCITE_ARTEFACTS", request.config.rootpath / "artefacts")) / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return lambda page, name: page.screenshot(path=folder / f"{name}.png", full_page=True)


def wait(condition, seconds=240):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)
    return found


def outside(page, served):
    return [url for url in page.requests_made if not url.startswith((served.url, "data:", "blob:"))]


def train(folder, seed, steps, pause):
    """A real training, watched. By hand, since making the first optimizer of a process imports torch's compiler."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))
    x = torch.randn(64, 8)
    y = (x[:, :2].sum(1, keepdim=True) > 0).float()
    weights = list(model.parameters())
    probes = [Loss(), Distance(Every(2)), Rank(Every(2))]
    with excite.watch(model, example=x, run=folder, probes=probes) as watch:
        for _ in range(steps):
            loss = (model(x) - y).square().mean()
            with torch.no_grad():
                for weight, gradient in zip(weights, torch.autograd.grad(loss, weights)):
                    weight -= 0.1 * gradient
            watch.step(loss)
            time.sleep(pause)


@pytest.fixture
def training(tmp_path):
    """A training in a process of its own, which starts when told to. Forked before any thread or browser is started."""
    context = multiprocessing.get_context("fork")
    go = context.Event()

    def body():
        go.wait()
        train(tmp_path / "runs/first", 0, 1_000_000, 0.01)

    process = context.Process(target=body, daemon=True)
    process.start()
    yield process, go
    process.kill()
    process.join()


@pytest.mark.slow
def test_curves_grow_during_training_and_the_page_outlives_it(training, tmp_path, serve, browser_page, keep):
    process, go = training
    root = tmp_path / "runs"
    root.mkdir()
    served = serve(root)
    page = browser_page
    page.set_default_timeout(240_000)
    page.goto(served.url)
    page.wait_for_selector("#empty:not([hidden])")  # there is no run yet; it appears by itself
    go.set()
    page.wait_for_selector("#runs .status.running")
    page.get_by_role("link", name="first").press("Enter")
    page.wait_for_selector("#chart-losses canvas")
    before = lengths(page, "chart-losses")
    wait(lambda: page.evaluate(COLUMNS))
    columns = page.evaluate(COLUMNS)[0]
    grown = wait(lambda: (now := lengths(page, "chart-losses"))[-1] > before[-1] + 20 and now)
    assert len(grown) == 2  # every step, and calmed
    wait(lambda: page.evaluate(COLUMNS)[0] > columns)  # the heat map grows as well
    assert page.evaluate(ROWS, "chart-map-ranks") == ["0", "2", "4"]
    page.wait_for_selector("#findings li")
    assert "The loss went from" in page.locator("#findings").inner_text()
    keep(page, "live-training")

    os.kill(process.pid, signal.SIGKILL)
    process.join()
    page.wait_for_selector("#heads .status.stale", timeout=240_000)
    steps, values = load_run(root / "first").series("loss/step")
    wait(lambda: page.evaluate(CURVES, "chart-losses")[0]["x"][-1] == steps[-1])
    shown = page.evaluate(CURVES, "chart-losses")[0]["y"][-1]
    assert shown == pytest.approx(values[-1], rel=1e-4)  # what the page shows is what was measured
    assert served.ask("/api/runs")[0] == 200
    keep(page, "live-killed")
    assert page.problems == []
    assert outside(page, served) == []


def make(path, seed, layers=3, steps=200):
    with Run.create(path, {"seed": seed, "radius": 0.1 * seed}) as run:
        for step in range(steps):
            ranks = {f"rank/share/fc{i}": max(0.1, 0.9 - seed * i * step / 1000) for i in range(layers)}
            run.log(step, {"loss/step": 1 / (step + 1 + seed), "weights/norm": step, **ranks})
    return path


@pytest.mark.slow
def test_two_runs_on_the_same_axes(tmp_path, serve, browser_page, keep):
    for seed in (0, 1, 2):
        make(tmp_path / f"run {seed} <b>", seed)
    served = serve(tmp_path)
    page = browser_page
    page.emulate_media(color_scheme="dark")
    page.goto(served.url)
    page.get_by_label("Filter").fill("run 1")
    page.wait_for_function("document.querySelectorAll('#runs tbody tr:not([hidden])').length === 1")
    page.get_by_label("Filter").fill("")
    for seed in (0, 2):
        page.get_by_label(f"compare run {seed} <b>").press("Space")
    page.get_by_role("button", name="Compare 2 runs").press("Enter")
    page.wait_for_selector("#chart-losses canvas")
    page.wait_for_selector("body[data-drawn=full]")
    assert page.locator("#chart-losses canvas").count() == 1  # one set of axes
    assert sorted(curve["name"] for curve in page.evaluate(CURVES, "chart-losses")) == ["run 0 <b>", "run 2 <b>"]
    page.locator("#panel-ranks").scroll_into_view_if_needed()
    wait(lambda: len(lengths(page, "chart-ranks")) == 6)  # three layers each, side by side
    page.locator("#panel-ranks").get_by_label("of").select_option(label="fc2")
    wait(lambda: len(lengths(page, "chart-ranks")) == 2)  # one layer: both on one set of axes
    assert len(page.evaluate(COLUMNS)) == 2  # a heat map each
    page.get_by_text("Other metrics").press("Enter")
    wait(lambda: len(lengths(page, "chart-other-weights")) == 2)
    page.wait_for_selector("#differing tr.differs")
    assert page.locator("#differing tr.differs").first.inner_text().split()[0] == "seed"
    keep(page, "compare-dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200
    assert page.problems == []
    assert outside(page, served) == []


@pytest.mark.slow
def test_zooming_in_asks_for_the_points_between(tmp_path, serve, browser_page):
    with Run.create(tmp_path / "long", {}) as run:
        for step in range(20_000):
            run.log(step, {"loss/step": 1.0 + (step == 12_345)})
    page = browser_page
    page.goto(f"{serve(tmp_path).url}/view?run=long")
    page.wait_for_selector("body[data-drawn=full]")
    steps = page.evaluate(CURVES, "chart-losses")[0]["x"]
    assert len(steps) <= 1000
    assert 12_345 in steps  # the one high value is not lost
    page.evaluate("() => document.getElementById('chart-losses').chart.zoomTo([12300, 12400])")
    wait(lambda: lengths(page, "chart-losses")[0] == 103)
    page.locator("#chart-losses .plot").press("Escape")
    wait(lambda: page.evaluate(CURVES, "chart-losses")[0]["x"][-1] == 19_999)
    assert page.problems == []


@pytest.mark.slow
def test_layers_stand_in_the_order_in_which_they_are_executed(tmp_path, serve, browser_page):
    model = nn.Sequential(OrderedDict(last_name=nn.Linear(8, 4), relu=nn.ReLU(), a=nn.Linear(4, 1)))
    with excite.watch(model, torch.randn(20, 8), tmp_path / "a", probes=[Rank()]) as watch:
        watch.step(1.0)
    browser_page.goto(f"{serve(tmp_path).url}/view?run=a")
    browser_page.wait_for_selector("#chart-map-ranks canvas")
    assert browser_page.evaluate(ROWS, "chart-map-ranks") == ["last_name", "a"]
    browser_page.wait_for_selector("#wiring")


@pytest.mark.slow
def test_with_a_token(tmp_path, serve, browser_page):
    make(tmp_path / "a", 0, steps=20)
    served = serve(tmp_path, token="correct-horse-battery", host="0.0.0.0")
    browser_page.goto(f"{served.url}/view?run=a&token=correct-horse-battery")
    browser_page.wait_for_selector("body[data-drawn=full]")
    assert browser_page.url == f"{served.url}/view?run=a"
    assert browser_page.problems == []
