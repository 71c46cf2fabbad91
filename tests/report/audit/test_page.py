"""The page, and the command that writes it."""

import json

import pytest
import torch
from torch import nn

from excite import load_run
from excite.report.audit import audit

from ..conftest import CURVES

CONFIG = """
epochs = 2
batch = 16
watch = false
[data]
name = "moons"
train = 16
test = 8
[model]
name = "mlp"
options = { widths = [3] }
[optimizer]
name = "sgd"
lr = 0.1
"""


@pytest.fixture(scope="module")
def found():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 1))
    x, y = torch.randn(12, 1, 4, 4), torch.arange(12) % 2
    return audit(model, (x, y), loss="squared", descent=0.1, margin_points=4)


@pytest.mark.slow
def test_names_are_escaped(tmp_path):
    evil = "</script><img src=x onerror=alert(1)>"
    model = nn.Sequential()
    model.add_module(evil, nn.Linear(2, 1))
    x, y = torch.randn(6, 2), torch.arange(6) % 2
    html = audit(model, (x, y), margin_points=1).write(tmp_path / "page.html").read_text()
    assert evil not in html
    assert "<img src=x" not in html
    assert "&lt;img src=x" in html


def test_the_command_writes_the_page_and_the_artifact(excite, tmp_path):
    (tmp_path / "first.toml").write_text(CONFIG)
    assert excite("train", "first.toml", "--no-margins")[0] == 0
    status, out, err = excite("audit", "runs/first", "--out", "pages/a.html", "--no-margins")
    assert status == 0, err
    assert "page: pages/a.html" in out
    assert "Lipschitz constant of the network" in out
    assert "Not measured: not requested" in (tmp_path / "pages/a.html").read_text()
    stored = load_run(tmp_path / "runs/first").read_json("audit")
    assert [layer["layer"] for layer in stored["layers"]] == ["1", "3"]
    assert stored["layers"][0]["units"]["width"] == 2
    assert load_run(tmp_path / "runs/first").status == "done"
    status, out, _ = excite("audit", "runs/first", "--points", "4", "--no-units", "--no-margins")
    assert status == 0
    assert "4 of 16" in out
    assert "units" not in json.loads((tmp_path / "runs/first/artifacts/audit.json").read_text())["layers"][0]


def test_the_command_says_in_one_line_what_is_wrong(excite, tmp_path):
    (tmp_path / "other.safetensors").write_bytes(b"x")
    for path in ("nowhere", ".", "other.safetensors"):
        status, out, err = excite("audit", path)
        assert status == 1
        assert out == ""
        assert err.startswith("excite: ")
        assert err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.browser
def test_the_page_in_a_browser(found, tmp_path, browser_page):
    path = found.write(tmp_path / "audit.html")
    browser_page.goto(path.as_uri())
    browser_page.wait_for_selector("#chart-margins-inf canvas")
    assert browser_page.title() == "Audit of Sequential"
    curves = {
        "explained": 3,
        "constants": 2,
        "margins-2": 2,
        "margins-inf": 2,
    }  # guaranteed and certified ones included
    for chart, count in curves.items():
        assert len(browser_page.evaluate(CURVES, f"chart-{chart}")) == count, chart
    assert browser_page.locator("#layers tr").count() == 1 + len(found.layers)
    assert browser_page.locator("#units tr").count() == 1 + len(found.layers)
    assert browser_page.locator("#silent tr").count() == len(found.not_applicable)
    assert browser_page.locator(".card").count() == len(found.theorems)
    assert browser_page.locator("#sentences li").count() == len(found.sentences)
    assert found.headline.action in browser_page.locator("#verdict").inner_text()
    text = browser_page.locator("#layers").inner_text()
    assert f"{found.layers['0'].covariance.effective_rank:.1f}" in text
    assert browser_page.evaluate("document.documentElement.scrollWidth") <= 1200
    assert browser_page.problems == []
    assert [url for url in browser_page.requests_made if not url.startswith(("file:", "data:"))] == []
