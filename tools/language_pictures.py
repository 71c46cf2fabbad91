"""Pictures of the guide on language models in docs/images: attention-heads and flight-recorder.

Trains the GPT of the guide, whose first block of code is taken from there, and opens its page. `make pictures` runs this (about a minute).
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from pictures import ROOT, WIDTH, save, served
from torch.nn.functional import cross_entropy

import excite

STEPS, SPIKE = 220, range(150, 160)  # steps whose learning rate of embeddings and output is far too high
PICTURES = {"attention-heads.png": "#panel-attention", "flight-recorder.png": "#panel-recorder"}


def guide() -> dict[str, Any]:
    """The names that the first block of code of the guide defines: model, text, batch; without its training."""
    text = (ROOT / "docs/language-models.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", text, re.S)[0].partition("gpt = GPT()")[0]
    names: dict[str, Any] = {"torch": torch, "nn": torch.nn}
    exec(code, names)
    return names


def train(run: Path) -> None:
    """A training whose loss spikes."""
    names = guide()
    torch.manual_seed(0)
    gpt = names["GPT"]()
    groups = [{"params": list(block.parameters())} for block in gpt.blocks]
    groups += [{"params": [p for path, p in gpt.named_parameters() if not path.startswith("blocks")]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    example = names["batch"](names["text"])[:, :-1]
    with excite.watch(gpt, example=example, run=run, optimizer=optimizer, every=10) as watch:
        for step in range(STEPS):
            optimizer.param_groups[-1]["lr"] = 1.0 if step + 1 in SPIKE else 1e-3
            ids = names["batch"](names["text"])
            optimizer.zero_grad()
            loss = cross_entropy(gpt(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            watch.step(loss)


def main() -> None:
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder) / "gpt")
        with sync_playwright() as playwright, served(Path(folder)) as address:
            chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": WIDTH, "height": 900})
            page.goto(f"{address.rstrip('/')}/view?run=gpt")
            page.wait_for_timeout(4000)
            page.evaluate("document.getElementById('others').open = true")
            for name, part in PICTURES.items():
                page.locator(part).first.scroll_into_view_if_needed()  # panels are drawn when they come into view
                page.wait_for_timeout(4000)
                save(page.locator(part).first.screenshot(), name)
            browser.close()


if __name__ == "__main__":
    main()
