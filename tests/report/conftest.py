"""Runs with made-up margins."""

import math

import numpy as np
import pytest
import torch

from excite.margin import Margins
from excite.runs import Run

# What the charts in a place draw: one entry per curve.
CURVES = """(id) => {
    const place = document.getElementById(id);
    const charts = place ? [place, ...place.children].filter((one) => one.chart).map((one) => one.chart) : [];
    return charts.flatMap((chart) => chart.series.map(({ name, x, y }) => ({ name, x, y })));
}"""
# The rows of the heat maps in a place, as shown.
ROWS = "(id) => [...document.querySelectorAll(`#${id} .row`)].map((row) => row.textContent)"

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


@pytest.fixture(autouse=True)
def unlimited(monkeypatch):
    """No test depends on the clock: time limits are off unless a test sets them."""
    from excite.report.live import connections, folder

    for name in ("LIST_SECONDS", "ROW_SECONDS", "QUERY_SECONDS"):
        monkeypatch.setattr(folder, name, math.inf)
    for name in ("REQUEST_SECONDS", "WRITE_SECONDS"):
        monkeypatch.setattr(connections, name, 1e6)
