"""Files that were lost or damaged: noticed when a run is continued, mended by `excite repair`."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from excite.errors import RunError
from excite.runs import Run, checkpoints, load_run, repair
from excite.train.from_config import train

MOONS: dict[str, Any] = {
    "data": {"name": "moons", "train": 40, "test": 20},
    "model": {"name": "mlp", "options": {"widths": [4]}},
    "optimizer": {"name": "sgd", "lr": 0.1},
    "epochs": 4,
    "batch": 10,
    "watch": False,
}


class Stop(Exception):
    pass


def killed(path: Path, at: int, checkpoint_every: int = 4) -> dict[str, Any]:
    """A training that ends at step `at` without closing its run; returns the config."""
    config = {**MOONS, "checkpoint_every": checkpoint_every}

    def stop(phase: str, done: int, total: int) -> None:
        if done == at:
            raise Stop

    with pytest.raises(Stop):
        train(config, path, stop)
    return config


def without_log(path: Path, steps: int) -> None:
    """Leave the metrics as they would be if metrics.db-wal had been lost since step `steps`."""
    with Run.open(path, "a") as run:
        run._metrics.rewind(steps)
        lost = {
            commits for _, commits in ((c.step, checkpoints.read_with_commits(c.path)[2]) for c in run.checkpoints())
        }
        run._metrics.set_commits(min(lost) - (steps < run.checkpoints()[0].step))
        run.set_status("stopped")


def test_a_lost_log_is_noticed_when_the_run_is_continued(tmp_path: Path) -> None:
    """The log as SQLite writes it: metrics.db holds what was there before it was begun."""
    with Run.create(tmp_path / "run", {}) as run:
        run.log(1, {"a/b": 1.0})
        run.flush()
        shutil.copy(tmp_path / "run/metrics.db", tmp_path / "before.db")
        run.save_checkpoint(1, {"a": torch.zeros(1)})
    shutil.copy(tmp_path / "before.db", tmp_path / "run/metrics.db")
    with Run.open(tmp_path / "run", "a") as run:
        assert len(run.frame()) == 0
        with pytest.raises(RunError, match=r"metrics are empty, the checkpoint is of step 1.*excite repair") as error:
            run.load_checkpoint()
        assert "\n" not in str(error.value)
    with load_run(tmp_path / "run") as run:  # to look at the model is not to continue
        assert run.load_checkpoint()[0] == 1


def test_training_without_metrics_continues_only_after_repair(tmp_path: Path) -> None:
    whole = train({**MOONS, "checkpoint_every": 4}, tmp_path / "whole").frame()
    path = tmp_path / "run"
    config = killed(path, 11)
    without_log(path, 4)
    with pytest.raises(RunError, match="the metrics end at step 4, the checkpoint is of step 8"):
        train(config, path)
    found = repair(path, dry_run=True)
    assert not found.whole
    assert len(found.problems) == 1
    assert found.step == 4
    found = repair(path)
    assert found.whole
    assert "step 4, which they reach" in str(found)
    assert found.backup is not None
    assert [p.name for p in (found.backup / "checkpoints").iterdir()] == ["step-00000008.safetensors"]
    assert train(config, path).frame().equals(whole)
    assert repair(path).problems == ()


def test_where_metrics_reach_no_checkpoint_the_newest_is_used(tmp_path: Path) -> None:
    path = tmp_path / "run"
    config = killed(path, 11)
    without_log(path, 2)
    found = repair(path)
    assert found.whole
    assert found.step == 8
    steps = train(config, path).series("loss/step")[0].tolist()
    assert steps == [1, 2, *range(9, 17)]


def test_a_run_without_metrics_is_continued_with_a_new_table(tmp_path: Path) -> None:
    path = tmp_path / "run"
    config = killed(path, 11)
    for name in ("metrics.db", "metrics.db-wal", "metrics.db-shm"):
        (path / name).unlink(missing_ok=True)
    with pytest.raises(RunError, match=r"metrics.db is missing: `excite repair"):
        load_run(path)
    with pytest.warns(UserWarning, match=r"metrics.db is missing.* a new table is started"):
        assert train(config, path).series("loss/step")[0].tolist() == list(range(9, 17))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(config, path).close()


def test_a_checkpoint_of_an_older_version_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    with Run.create(tmp_path / "run", {}) as run:
        run.log(1, {"a/b": 1.0})
        path = run.save_checkpoint(1, {"a": torch.ones(1)}).path
        with safe_open(path, framework="pt") as file:
            header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        del header["metrics"]
        header |= {"version": "1", "sha256": checkpoints.checksum(1, tensors, header["state"], "")}
        save_file(tensors, path, header)
        run._metrics.set_commits(0)
        assert run.load_checkpoint()[0] == 1


def contents(path: Path) -> dict[Path, bytes]:
    """All files; reading a database leaves an empty log beside it."""
    return {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and not p.name.startswith("metrics.db-")}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Run.create(tmp_path / "run", {"a": 1}) as run:
        for step in range(1, 2001):
            run.log(step, {"a/b": float(step), "a/c": 1.0})
            if step % 1000 == 0:
                run.save_checkpoint(step, {"a": torch.ones(3)})
        run.write_json("notes", {"b": 2})
    return tmp_path / "run"


def test_what_is_whole_is_left_alone(path: Path) -> None:
    before = contents(path)
    for dry_run in (True, False):
        found = repair(path, dry_run=dry_run)
        assert found.whole
        assert found.problems == ()
        assert found.step == 2000
        assert "nothing is wrong" in str(found)
    assert before == contents(path)


def test_everything_that_can_be_mended_is_mended_and_kept_beside(path: Path) -> None:
    (path / "run.json").write_text("{")
    (path / "environment.json").unlink()
    (path / "artifacts/notes.json").write_text("[1, ")
    newest = path / "checkpoints/step-00002000.safetensors"
    newest.write_bytes(newest.read_bytes()[:-4])
    (path / "checkpoints/step--0000001.safetensors").write_bytes(newest.read_bytes())
    content = bytearray((path / "metrics.db").read_bytes())
    size = int.from_bytes(content[16:18], "big")
    content[5 * size : 6 * size] = b"\xff" * size
    (path / "metrics.db").write_bytes(bytes(content))
    before = contents(path)
    found = repair(path, dry_run=True)
    assert not found.whole
    assert before == contents(path)
    assert [p.what.split()[0].rsplit("/")[-1] for p in found.problems] == [
        "run.json", "environment.json", "step--0000001.safetensors", "step-00002000.safetensors", "notes.json", "metrics.db",
    ]  # fmt: skip
    found = repair(path)
    assert found.whole
    assert found.step == 1000
    assert found.backup is not None
    assert (found.backup / "checkpoints" / newest.name).read_bytes() == before[newest]
    assert (found.backup / "metrics.db").read_bytes() == before[path / "metrics.db"]
    with Run.open(path, "a") as run:
        assert run.status == "stopped"
        assert run.load_checkpoint()[0] == 1000
        frame = run.frame()
    assert 0 < len(frame) < 4000
    right = frame["name"].map({"a/b": 0.0, "a/c": 1.0}).where(frame["name"] == "a/c", frame["step"].astype(float))
    assert (frame["value"] == right).all()
    assert repair(path).problems == ()


def test_what_cannot_be_mended_is_said(path: Path, tmp_path: Path, excite: Any) -> None:
    (path / "config.json").write_text("{")
    status, out, _ = excite("repair", path)
    assert status == 1
    assert "config.json is damaged" in out
    assert "restore it from a copy" in out
    with pytest.raises(RunError, match="not a run folder"):
        repair(tmp_path)
    with Run.create(tmp_path / "new", {}):
        for dry_run in (True, False):
            with pytest.raises(RunError, match="another process is writing"):
                repair(tmp_path / "new", dry_run=dry_run)


def test_the_command_says_what_it_did(path: Path, excite: Any) -> None:
    assert excite("repair", path)[0] == 0
    (path / "metrics.db").unlink()
    status, out, _ = excite("repair", path, "--dry-run")
    assert status == 1
    assert "metrics.db is missing" in out
    assert not (path / "metrics.db").exists()
    status, out, _ = excite("repair", path)
    assert status == 0
    assert "a new table is started" in out
    assert json.loads((path / "run.json").read_text())["status"] == "done"
