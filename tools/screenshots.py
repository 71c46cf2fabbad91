"""Pictures of the live page and of the report for README and docs: docs/images/live.png and docs/images/report.png.

    python tools/screenshots.py [--out docs/images] [--steps 1200] [--chromium PATH]

Trains a small network on handwritten digits (ten classes, the data of scikit-learn) with `excite.watch`, opens the live page
while the run is open and the report after its end, and saves what a browser shows first. Needs playwright and a Chromium.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

import excite
from excite.report import make_report

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

MAX_BYTES = 300_000
SIZE = {"width": 1180, "height": 1010}


def digits(train: int = 500) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Handwritten digits as 8 × 8 images in [0, 1]: training and test data."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)[order] / 16
    y = torch.tensor(labels)[order]
    return (x[:train], y[:train]), (x[train:], y[train:])


@contextmanager
def training(folder: Path, steps: int) -> Iterator[None]:
    """Trains for `steps` steps; the run stays open, as that of a training that continues, until the end of the block."""
    torch.manual_seed(0)
    train, test = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(512, 64),
        nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    config = {"lr": 0.05, "momentum": 0.9, "batch": 50, "data": "digits", "points": len(train[1])}
    draw = torch.Generator().manual_seed(1)
    every = {"margin_gap": steps // 12}  # by default a share of the time, of which a training of seconds has none
    data = {"train": train, "test": test}
    with excite.watch(model, run=folder, optimizer=optimizer, every=every, config=config, **data) as watch:
        for _ in range(steps):
            chosen = torch.randint(len(train[1]), (50,), generator=draw)
            loss = nn.functional.cross_entropy(model(train[0][chosen]), train[1][chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.step(loss)
        watch.flush()
        yield


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """The live page of a folder of runs; its address."""
    command = [sys.executable, "-m", "excite", "serve", str(root), "--port", "0"]
    environment = {**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[1]
    finally:
        process.terminate()
        process.wait()


def picture(browser: Browser, address: str, target: Path) -> None:
    """Saves what the page at `address` shows first."""
    page = browser.new_page(viewport=SIZE, device_scale_factor=1.5)  # type: ignore[arg-type]
    page.goto(address)
    page.wait_for_selector("#chart-median-margins canvas")
    page.wait_for_selector("#findings li")
    page.wait_for_timeout(500)
    page.screenshot(path=target)
    page.close()
    size = target.stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"{target} has {size:,} bytes; expected at most {MAX_BYTES:,}")
    print(f"{target}: {size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--chromium", default=os.environ.get("CHROMIUM") or shutil.which("chromium"))
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        runs = Path(folder) / "runs"
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox", "--disable-gpu"])
        with training(runs / "digits", options.steps), serving(runs) as address:
            picture(browser, f"{address}view?run=digits", options.out / "live.png")
        report = make_report([runs / "digits"]).write(Path(folder) / "report.html", "Digits, ten classes")
        picture(browser, report.as_uri(), options.out / "report.png")
        browser.close()


if __name__ == "__main__":
    main()
