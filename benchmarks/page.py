"""The live page on a run of one million points: how long until it is drawn, and how much memory the browser takes.

    python -m benchmarks.page [--points 1000000] [--repeats 5] [--seconds 15] [--chromium PATH]

Half of the points are the losses of every step, the others five quantities of twenty layers. Every repeat starts a new
server and a new browser, which has shown another page but has nothing of this one cached; then the same page is opened
again in a new context. "First curves" are drawn from a few values of every series, "everything read" when the smallest and
largest of every stretch are drawn for all panels in sight. Memory is measured while a writer goes on for some seconds and the page keeps up: the largest of the JavaScript heap, and of what
the page's process holds for itself. Needs Linux, playwright and a Chromium, and a machine with nothing else to do: the
load is printed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import machine
from excite.runs import Run

LAYERS = [f"layer{i}" for i in range(20)]
BY_LAYER = ("rank/share", "rank/effective", "trajectory/mean", "distance/relative", "conservation/drift")
ARGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


def make(folder: Path, points: int) -> Run:
    """A run with about that many points; it stays open."""
    run = Run.create(folder, {"points": points})
    rng = np.random.default_rng(0)
    steps = points // 2
    every = steps // (points // 2 // (len(LAYERS) * len(BY_LAYER)))
    losses = np.exp(-np.arange(steps) / steps * 5) * (1 + 0.3 * rng.standard_normal(steps)) ** 2
    for step in range(steps):
        values = {"loss/step": losses[step]}
        if step % every == 0:
            values |= {f"{name}/{layer}": 0.1 + 0.8 * step / steps for name in BY_LAYER for layer in LAYERS}
        run.log(step, values)
    run.flush()
    return run


def serve(root: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "excite.cli.app", "serve", str(root), "--port", "0"]
    environment = {**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    return process, process.stdout.readline().split()[1]


def opened(browser: Any, url: str, server: int) -> tuple[Any, dict[str, float]]:
    """A page in a new context, and what passed until its first curves and until everything was read.

    Seconds, processor time of everything, and of it what the page's main thread worked until its first curves.
    """
    page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    before = seconds_used(browser, server)
    start = time.perf_counter()
    page.goto(url, wait_until="commit")
    found = {}
    for name, wanted in (("first", "#chart-losses canvas"), ("all", "body[data-drawn=full]")):
        page.wait_for_selector(wanted, timeout=120_000, state="attached")
        found[name] = time.perf_counter() - start
        if name == "first":
            metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
            found["main"] = metrics["TaskDuration"]
            found["paint"] = (
                page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? NaN") / 1000
            )
        found[f"{name} used"] = seconds_used(browser, server) - before
    return page, found


def seconds_used(browser: Any, server: int) -> float:
    """Processor time of the server and of all processes of the browser, which other work on the machine does not stretch."""
    found = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
    return sum(one["cpuTime"] for one in found) + _ticks(server) / os.sysconf("SC_CLK_TCK")


def _ticks(pid: int) -> int:
    """Of a process and of those that it started."""
    try:
        own = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        children = {
            child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
        }
    except OSError:
        return 0
    return sum(map(int, own)) + sum(_ticks(int(child)) for child in children)


def memory(page: Any, browser: Any) -> tuple[float, float]:
    """(JavaScript heap, private memory of the largest page process) in MB."""
    heap = page.context.new_cdp_session(page).send("Runtime.getHeapUsage")["usedSize"]
    found = browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
    private = [_private(one["id"]) for one in found if one["type"] == "renderer"]
    return heap / 1e6, max(private, default=float("nan"))


def _private(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return float("nan")
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1e3


def kept_up(page: Any, browser: Any, run: Run, seconds: float) -> tuple[float, float, int]:
    """The largest memory while the run grows by 500 steps per second, and how often the page was drawn again."""
    largest = [0.0, 0.0]
    step, end = run.series("loss/step")[0][-1] + 1, time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(500):
            run.log(
                int(step),
                {"loss/step": 0.01, **({f"rank/share/{layer}": 0.5 for layer in LAYERS} if step % 100 == 0 else {})},
            )
            step += 1
        run.flush()
        page.wait_for_timeout(1000)
        largest = [max(pair) for pair in zip(largest, memory(page, browser))]
    return largest[0], largest[1], int(page.evaluate("document.body.dataset.updates"))


def spread(values: list[float], form: str = ".2f") -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}–{max(values):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--chromium", default=os.environ.get("CHROMIUM") or shutil.which("chromium"))
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    times: dict[str, list[float]] = {}
    memories: dict[str, list[float]] = {"heap": [], "private": []}
    updates = 0
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run = make(Path(folder) / "runs" / "long", options.points)
        with run:
            for _ in range(options.repeats):
                process, address = serve(Path(folder) / "runs")
                browser = playwright.chromium.launch(executable_path=options.chromium, args=ARGS)
                try:
                    url = f"{address}view?run=long"
                    browser.new_page().goto(f"{address}assets/page.css")  # a browser that is up, like anyone's
                    time.sleep(2)
                    page, spent = opened(browser, url, process.pid)
                    heap, private, updates = kept_up(page, browser, run, options.seconds)
                    page.context.close()
                    spent["again"] = opened(browser, url, process.pid)[1]["all"]
                finally:
                    browser.close()
                    process.terminate()
                    process.wait()
                for name, value in spent.items():
                    times.setdefault(name, []).append(value)
                memories["heap"].append(heap)
                memories["private"].append(private)
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    print(
        f"## The live page\n\nA run of {options.points:,} points, 101 series; {machine()}; load {load:.1f} per core\n"
    )
    print(f"Median of {options.repeats} (smallest–largest).\n")
    print("| opening | seconds |\n|---|---|")
    print(f"| first paint: verdict and table | {spread(times['paint'])} |")
    print(f"| first curves on the screen | {spread(times['first'])} |")
    print(f"| work of the page's main thread until the first curves | {spread(times['main'])} |")
    print(
        f"| processor time until the first curves, server and all processes of the browser | {spread(times['first used'])} |"
    )
    print(f"| everything read | {spread(times['all'])} |")
    print(f"| processor time until then, server and all processes of the browser | {spread(times['all used'])} |")
    print(f"| opened again, until everything is read (server warm, browser not) | {spread(times['again'])} |")
    print(f"\n| browser memory over {options.seconds:g} s, {updates} updates | MB |\n|---|---|")
    print(f"| JavaScript heap, largest | {spread(memories['heap'], '.0f')} |")
    print(f"| private memory of the page's process, largest | {spread(memories['private'], '.0f')} |")


if __name__ == "__main__":
    main()
