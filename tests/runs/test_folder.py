"""The files of a run folder: what is written is read back, what is damaged or unusable is refused by name."""

from __future__ import annotations

import json
import math

import pytest

from excite.errors import InputError, RunError
from excite.runs.folder import (
    VERSION,
    build,
    check_folder_name,
    check_marker,
    equal_values,
    new_marker,
    normalized_config,
    refuse_existing,
    start_metrics,
)
from excite.runs.metrics import MetricsTable


def test_a_built_folder_is_a_running_run(tmp_path):
    (tmp_path / "run").mkdir()
    lock = build(tmp_path / "run", {"lr": 0.1}, tmp_path / "run")
    lock.release()
    assert check_marker(tmp_path / "run") == "running"
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"lr": 0.1}
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"artifacts", "checkpoints", "metrics.db"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "is not a run folder"),
        ({"version": VERSION + 1}, "upgrade Excite"),
        ({"status": "sleeping"}, "is damaged: its status is 'sleeping'"),
    ],
)
def test_a_foreign_marker_is_refused(tmp_path, change, message):
    (tmp_path / "run.json").write_text(json.dumps({**new_marker("done"), **change}))
    with pytest.raises(RunError, match=message):
        check_marker(tmp_path)


def test_configs_are_equal_as_json_gives_them_back():
    config = {"radius": (0.1, 0.2), "layers": {1: math.nan}}
    read = normalized_config(config)
    assert read["radius"] == [0.1, 0.2]
    assert list(read["layers"]) == ["1"]
    assert equal_values(read, normalized_config(config))
    assert not equal_values(read, normalized_config({**config, "radius": (0.1, 0.3)}))
    assert not equal_values(read, {**read, "seed": 0})
    with pytest.raises(InputError, match="cannot be written as JSON"):
        normalized_config({"model": object()})


@pytest.mark.parametrize("name", ["", 3, "x" * 300, "a\0b"])
def test_names_no_folder_can_have(name):
    with pytest.raises(InputError):
        check_folder_name(name)


def test_only_an_empty_folder_may_exist(tmp_path):
    refuse_existing(tmp_path / "new")
    (tmp_path / "empty").mkdir()
    refuse_existing(tmp_path / "empty")
    (tmp_path / "empty" / "file").touch()
    with pytest.raises(RunError, match="is not empty"):
        refuse_existing(tmp_path / "empty")
    with pytest.raises(RunError, match="is not a directory"):
        refuse_existing(tmp_path / "empty" / "file")


def test_a_new_table_accepts_earlier_checkpoints(tmp_path):
    from excite.runs import Run

    with Run.create(tmp_path / "run", {}) as run:
        for step in range(3):
            run.log(step, {"loss/step": 1.0})
            run.flush()
        run.save_checkpoint(3, {"weights": [1.0]})
    (tmp_path / "run" / "metrics.db").unlink()
    start_metrics(tmp_path / "run")
    table = MetricsTable(tmp_path / "run" / "metrics.db", "r")
    assert table.commits >= 3
    assert table.names() == []
    table.close()
