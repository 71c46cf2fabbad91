"""Pictures of the guides in docs/images: list, rank, compare, audit, probe, processes and data, from small trainings on digits.

`make pictures` runs this, tools/screenshots.py and tools/language_pictures.py (some minutes on a CPU). It needs Chromium and playwright.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import excite
from excite.data import load
from excite.probes import Every, Loss, Probe, StepContext

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs/images"
WIDTH, LARGEST = 1100, 200_000  # pixels, bytes


def train(run: Path, lr: float, epochs: int = 12) -> nn.Module:
    """A small convolutional network on ten classes of digits, monitored."""
    data = load("digits", scale=(0, 1))
    points, test = (data.x_train, data.y_train), (data.x_test, data.y_test)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    batches = DataLoader(TensorDataset(*points), batch_size=50, shuffle=True)
    often = ("trajectory", "distance", "rank", "conservation", "alignment", "signs")
    every = {**dict.fromkeys(often, 5), "margin_gap": 12}
    settings = {"lr": lr, "momentum": 0.9, "epochs": epochs, "batch": 50}
    with excite.watch(
        model, train=points, test=test, bounds=(0, 1), run=run, optimizer=optimizer, every=every, config=settings
    ) as watch:
        for _ in range(epochs):
            for x, y in batches:
                optimizer.zero_grad()
                loss = cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                watch.step(loss)
    return model


class Silent(Probe):
    """The example of the guide on custom probes: hidden units that no point of the example activates."""

    name, reduction = "silent", "max"

    def measure(self, ctx: StepContext) -> dict[str, torch.Tensor]:
        """Number of units of each layer."""
        return {f"units/{one.layer}": (~one.active.any(0)).sum() for one in ctx.signals if one.active is not None}


def with_own_probe(run: Path, steps: int = 300) -> None:
    """A training with a learning rate so high that units die, monitored by a probe of one's own."""
    data = load("digits", scale=(0, 1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    probes = [Loss(), Silent(Every(10))]
    with excite.watch(model, data.x_train[:200], run, optimizer, probes=probes, alerts=[]) as watch:
        for _ in range(steps):
            chosen = torch.randint(len(data.y_train), (50,))
            optimizer.zero_grad()
            loss = cross_entropy(model(data.x_train[chosen]), data.y_train[chosen])
            loss.backward()
            optimizer.step()
            watch.step(loss)


def on_processes(folder: Path) -> None:
    """One config trained by one process and by two."""
    config = folder / "digits.toml"
    config.write_text(CONFIG)
    for count in (1, 2):
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)] if count > 1 else []
        options = [str(config), "--folder", str(folder / f"processes/{count}")]
        subprocess.run([sys.executable, *launch, "-m", "excite", "train", *options], check=True, cwd=folder)


CONFIG = """
epochs = 12
batch = 50
loss = "cross-entropy"
device = "cpu"

[data]
name = "digits"

[model]
name = "mlp"

[optimizer]
name = "sgd"
lr = 0.1
"""


def save(image: bytes, name: str) -> None:
    """Writes a PNG with at most 256 colours, small enough for the site."""
    picture = Image.open(io.BytesIO(image)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    target = IMAGES / name
    picture.save(target, optimize=True)
    if target.stat().st_size > LARGEST:
        raise SystemExit(f"{target} has {target.stat().st_size:,} bytes: crop it")
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1000:.0f} kB")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of the live page of a folder."""
    command = [sys.executable, "-m", "excite", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if found := re.search(r"http://[^\s/]+(?:/\S*)?", line):
                    yield found[0]
                    return
            raise SystemExit("excite serve printed no address")
        finally:
            server.terminate()


def of_audit(model: nn.Module, target: Path) -> None:
    """The page of an audit."""
    data = load("digits", scale=(0, 1))
    points = {part: (getattr(data, f"x_{part}")[:300], getattr(data, f"y_{part}")[:300]) for part in ("train", "test")}
    excite.audit(model, **points).write(target)


def of_pages(folder: Path, audit: Path) -> None:
    """Pictures of the list of runs, a panel, a comparison and the audit."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, served(folder) as address:
        chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})

        def show(url: str) -> None:
            page.goto(url)
            page.wait_for_timeout(4000)

        def shoot(name: str, height: int = 720, part: str | None = None) -> None:
            if part is None:
                save(page.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": height}), name)
            else:
                page.evaluate("document.getElementById('others').open = true")
                page.locator(part).first.scroll_into_view_if_needed()  # panels are drawn when they come into view
                page.wait_for_timeout(4000)
                save(page.locator(part).first.screenshot(), name)

        home = address.rstrip("/")
        show(home)
        shoot("list.png", 330)
        for picture in PAGES:
            show(home + picture["path"])
            shoot(picture["name"], picture.get("height", 720), picture.get("part"))
        show(audit.as_uri())
        shoot("audit.png", 760)
        browser.close()


PAGES: list[dict[str, Any]] = [
    {"path": "/view?run=lr-0.05", "name": "rank.png", "part": "#panel-ranks"},
    {"path": "/view?run=lr-0.01&run=lr-0.05&run=lr-0.1", "name": "compare.png", "height": 900},
    {"path": "/view?run=own-probe", "name": "probe.png", "part": "#panel-other-silent"},
    {"path": "/view?run=processes/1&run=processes/2", "name": "processes.png", "part": "#panel-losses"},
]


def of_data() -> None:
    """Samples of the built-in datasets."""
    figure = Figure(figsize=(9, 2.4), layout="constrained", dpi=120)
    axes = figure.subplots(1, 4)
    digits = load("digits")
    tiles = nn.functional.pad(digits.x_train[:25, 0], (1, 1, 1, 1), value=1.0)
    rows = [torch.cat(list(tiles[5 * row : 5 * row + 5]), dim=1) for row in range(5)]
    axes[0].imshow(torch.cat(rows), cmap="gray")
    for axis, name in zip(axes[1:], ("moons", "boundaries", "linear-margins-1")):
        data = load(name)
        axis.scatter(*data.x_train.T, c=data.y_train, cmap="coolwarm", s=9)
    for axis, name in zip(axes, ("digits", "moons", "boundaries", "linear-margins-1")):
        axis.set(title=name, xticks=[], yticks=[])
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    save(buffer.getvalue(), "data.png")


def main() -> None:
    of_data()
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        models = [train(runs / f"lr-{lr}", lr) for lr in (0.01, 0.05, 0.1)]
        with_own_probe(runs / "own-probe")
        on_processes(runs)
        of_audit(models[1], Path(folder) / "audit.html")
        of_pages(runs, Path(folder) / "audit.html")


if __name__ == "__main__":
    main()
