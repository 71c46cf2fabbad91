"""Settings of all tests: one thread for each process (EXCITE_TEST_THREADS sets another number), no test that is timed.

Hypothesis draws the same examples everywhere. `pytest --hypothesis-profile random --hypothesis-seed N` draws others.
EXCITE_TEST_ORDER=N runs the tests in a random order of seed N: no test needs another to have run before it.
"""

import inspect
import os
import random
import shutil
import signal
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(int(os.environ.get("EXCITE_TEST_THREADS", "1")))
UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", derandomize=True, print_blob=True, **UNTIMED)
settings.register_profile("random", print_blob=True, **UNTIMED)
settings.load_profile("fixed")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; some tests send Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

CHROMIUM = (
    os.environ.get("CHROMIUM")
    or shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
NO_BROWSER = (
    "no Chromium: browser tests are skipped. Install one (apt-get install chromium), or name it with CHROMIUM=/path"
)


def pytest_collection_modifyitems(items):
    if CHROMIUM is None:
        for item in items:
            if item.get_closest_marker("browser"):
                item.add_marker(pytest.mark.skip(reason=NO_BROWSER))
    if seed := os.environ.get("EXCITE_TEST_ORDER"):
        random.Random(int(seed)).shuffle(items)


def pytest_terminal_summary(terminalreporter):
    if CHROMIUM is None:
        terminalreporter.write_line(NO_BROWSER, yellow=True)


@pytest.fixture(autouse=True)
def seeded():
    """Random numbers of a test do not depend on which tests ran before it in the same process."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - what libraries draw from
    torch.manual_seed(0)


def without_time_limit(monkeypatch, function):
    """The default of `seconds` becomes a year: not infinite, since solvers and timeouts take finite numbers only."""
    year, defaults = (
        3e7,
        {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()},
    )
    if "seconds" in (function.__kwdefaults__ or {}):
        monkeypatch.setitem(function.__kwdefaults__, "seconds", year)
    else:
        values = [year if name == "seconds" else default for name, default in defaults.items()]
        values = tuple(value for value in values if value is not inspect.Parameter.empty)
        monkeypatch.setattr(function, "__defaults__", values)


@pytest.fixture(autouse=True)
def untimed(monkeypatch):
    """What stops after some seconds by default (margins at the start and the end of a watch, readers of metrics, mixed-integer
    programs) has no limit, so that no result depends on how busy the machine is. Tests of limits pass `seconds`."""
    from excite.bounds.excitation.active import most_active
    from excite.bounds.excitation.two_layer import two_layer_lipschitz, two_layer_margin
    from excite.probes.margin_gap import MarginGap
    from excite.runs.reader.metrics_reader import MetricsReader
    from excite.runs.reader.overview import read_overview

    for function in (
        MarginGap.__init__, MetricsReader.__init__, read_overview, most_active, two_layer_lipschitz, two_layer_margin,
    ):  # fmt: skip
        without_time_limit(monkeypatch, function)


@pytest.fixture(scope="session")
def chromium():
    """Path of the browser."""
    return CHROMIUM


@pytest.fixture
def browser_page():
    """A page in headless Chromium that records console errors and every request that is not to a file."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
            ],
        )
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.set_default_timeout(240_000)  # a guard against hanging, not a measure of speed
        page.problems, page.requests_made = [], []
        page.on(
            "console",
            lambda message: page.problems.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("request", lambda request: page.requests_made.append(request.url))
        yield page
        browser.close()


@pytest.fixture
def excite(monkeypatch, capsys, tmp_path):
    """Runs the command in an empty folder; returns (exit status, standard output, standard error)."""
    from excite.cli import app as cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(cli.console, "_width", 140)

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["excite", *map(str, args)])
        status = 0
        try:
            cli.main()
        except SystemExit as stop:
            status = stop.code or 0
        out, err = capsys.readouterr()
        return status, out, err

    return run
