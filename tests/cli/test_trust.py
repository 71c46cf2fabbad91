"""A run of somebody else's is opened without running its code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from excite import load_run
from excite.errors import InputError
from excite.jobs.sweep import plan, run_sweep
from excite.report.audit import audit
from excite.runs import weights
from excite.runs.import_paths import ModelSource
from excite.studies.richness.by_spectra import SpectraMeasurement
from excite.train.evaluate import load_model
from excite.train.from_config import load_trained, train

MOONS: dict[str, Any] = {
    "data": {"name": "moons", "train": 20, "test": 10},
    "model": {"name": "mlp", "options": {"widths": [4]}},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "epochs": 1,
    "batch": 10,
    "watch": False,
}


def factory(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1))


OWN = {**MOONS, "model": {"name": f"{__name__}:factory", "options": {"width": 3}}}


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A run that was trained by a built-in model, and says now that its model is made by a shell command."""
    train(MOONS, tmp_path / "run").close()
    config = json.loads((tmp_path / "run/config.json").read_text())
    config["model"] = {"name": "os:system", "options": {"command": f"touch {tmp_path / 'executed'}"}}
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    return tmp_path / "run"


def spectra(path: Path) -> None:
    train(MOONS, path.parent / "own").close()
    saved = load_model(path.parent / "own")
    (path.parent / "own/config.json").write_bytes((path / "config.json").read_bytes())  # exchanged meanwhile
    SpectraMeasurement(5).measure(saved, "variant", lambda fraction: None)


@pytest.mark.parametrize("opened", [load_model, lambda p: load_trained(load_run(p)), audit, spectra])
def test_opening_a_foreign_run_executes_nothing(foreign: Path, opened: Any) -> None:
    with pytest.raises(InputError, match=r"config.json .*'os:system'.*--trust") as error:
        opened(foreign)
    assert "\n" not in str(error.value)
    assert not (foreign.parent / "executed").exists()


@pytest.mark.parametrize("command", ["margins", "audit"])
def test_commands_on_a_foreign_run_execute_nothing(excite: Any, foreign: Path, command: str) -> None:
    for path in (foreign, next((foreign / "checkpoints").iterdir())):
        status, _, err = excite(command, path)
        assert status == 1
        assert "os:system" in err
        assert "--trust" in err
        assert err.count("\n") == 1
    assert not (foreign.parent / "executed").exists()


@pytest.mark.slow
def test_starting_a_training_on_a_foreign_run_executes_nothing(foreign: Path) -> None:
    with pytest.raises(Exception, match="another config"):
        train(MOONS, foreign)
    assert (
        run_sweep(plan({**MOONS, "sweep": {"over": {"optimizer.lr": [0.1]}}}, foreign.parent / "sweep"), 1).failed
        is None
    )
    slot = next((foreign.parent / "sweep").glob("*-0"))
    (slot / "config.json").write_bytes((foreign / "config.json").read_bytes())
    result = run_sweep(plan({**MOONS, "sweep": {"over": {"optimizer.lr": [0.1]}}}, foreign.parent / "sweep"), 1)
    assert result.failed is not None
    assert "another config" in result.failed
    assert not (foreign.parent / "executed").exists()


@pytest.mark.slow
def test_weights_planted_in_a_run_are_not_what_was_trained(excite: Any, tmp_path: Path) -> None:
    """A finished training or job measures its checkpoint, not a file of weights that names another factory."""
    (tmp_path / "moons.json").write_text(json.dumps(MOONS))
    sweep = {**MOONS, "sweep": {"over": {"optimizer.lr": [0.1]}, "points": 2}}
    train(MOONS, tmp_path / "runs/moons").close()
    assert run_sweep(plan(sweep, tmp_path / "sweep"), 1).failed is None
    slot = next((tmp_path / "sweep").glob("*-0"))
    (slot / "artifacts/summary.json").unlink()
    planted = ModelSource("os:system", {"command": f"touch {tmp_path / 'executed'}"})
    for run in (tmp_path / "runs/moons", slot):
        _, state = load_run(run).load_checkpoint()
        weights.write(run / weights.NAME, state["model"], 100, planted)
    status, _, err = excite("train", "moons.json")
    assert status == 0, err
    assert run_sweep(plan(sweep, tmp_path / "sweep"), 1).failed is None
    assert (slot / "artifacts/summary.json").exists()
    assert not (tmp_path / "executed").exists()


@pytest.mark.slow
def test_ones_own_factory_trains_and_is_opened_with_trust(excite: Any, tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(json.dumps(OWN))
    status, _, err = excite("train", "own.json", "--no-margins")
    assert status == 0, err
    path = tmp_path / "runs/own"
    with pytest.raises(InputError, match="trust=True"):
        load_model(path)
    saved = load_model(path, trust=True)
    assert isinstance(saved.model[1], nn.Linear)  # type: ignore[index]
    assert audit(saved, points=5, with_margins=False).step == 2
    assert audit(path, points=5, with_margins=False, trust=True).step == 2
    assert load_trained(load_run(path), trust=True)[1].model.name == f"{__name__}:factory"
    assert excite("margins", path, "--points", "2", "--steps", "2", "--trust")[0] == 0
    assert excite("audit", path, "--points", "5", "--no-margins", "--trust")[0] == 0


@pytest.mark.slow
def test_a_sweep_over_ones_own_factory_needs_no_trust(tmp_path: Path) -> None:
    sweep = {"over": {"model.options.width": [2, 3]}, "points": 2}
    assert run_sweep(plan({**OWN, "sweep": sweep}, tmp_path / "sweep"), 1).failed is None


@pytest.mark.slow
def test_one_damaged_run_of_a_sweep_does_not_stop_the_others(tmp_path: Path) -> None:
    values = {**MOONS, "sweep": {"over": {"optimizer.lr": [0.1, 0.2]}, "points": 2}}
    assert run_sweep(plan(values, tmp_path / "sweep"), 1).failed is None
    first, second = sorted(path for path in (tmp_path / "sweep").iterdir() if path.is_dir())
    (first / "metrics.db").write_bytes(b"not a database" * 1000)
    (second / "artifacts/summary.json").unlink()
    result = run_sweep(plan(values, tmp_path / "sweep"), 1)
    assert result.failed is not None
    assert "excite repair" in result.failed
    assert (second / "artifacts/summary.json").exists()
