"""Points and results of a watch in its run."""

from __future__ import annotations

import json

import pytest
import torch

from excite import RunError
from excite.monitor import results
from excite.monitor.results import POINTS, artifact_name, read_points, store_points, store_results
from excite.runs import Run

X, Y = torch.rand(5, 1, 4, 4), torch.arange(5)


def test_points_come_back_with_how_they_are_measured(tmp_path):
    settings = {"bounds": (0, 1), "normalize": (torch.tensor([0.5]), (0.25,)), "output": lambda f: f, "key": None}
    with Run.create(tmp_path / "run", {}) as run:
        assert read_points(run.path) is None
        assert store_points(run, {"train": (X, Y), "test": (X[:2], Y[:2])}, settings)
    stored = read_points(tmp_path / "run")
    assert torch.equal(stored.data["train"][0], X)
    assert stored.data["test"][1].tolist() == [0, 1]
    assert stored.settings == {"bounds": [0, 1], "normalize": [[0.5], [0.25]], "key": None}


def test_large_points_are_not_stored_and_damaged_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "MAX_BYTES", 100)
    with Run.create(tmp_path / "run", {}) as run:
        assert not store_points(run, {"train": (X, Y)}, {})
        (run.path / "artifacts").mkdir(exist_ok=True)
        (run.path / "artifacts" / POINTS).write_bytes(b"no safetensors")
        with pytest.raises(RunError, match="damaged"):
            read_points(run.path)


def test_a_summary_keeps_the_name_of_the_variant(tmp_path):
    with Run.create(tmp_path / "run", {}) as run:
        store_results(run, {"summary": {"step": 3, "accuracy": {"test": 0.5}}})
        assert run.read_json("summary")["arm"] == "run"
        run.write_json("summary", {"arm": "plain"})
        store_results(run, {"summary": {"step": 4, "accuracy": {}}, artifact_name("inf", "test"): {"values": []}})
        assert json.loads((run.path / "artifacts" / "summary.json").read_text())["arm"] == "plain"
        assert run.read_json("margins-inf-test") == {"values": []}
