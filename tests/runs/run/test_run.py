from __future__ import annotations

import json
import math
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from excite.errors import InputError, RunError
from excite.runs import Run, load_run

CONFIG = {"epochs": 3, "data": {"name": "digits"}}


@pytest.fixture
def run(tmp_path: Path):
    with Run.create(tmp_path / "run", CONFIG) as run:
        yield run


def test_a_run_remembers_what_made_it(run: Run) -> None:
    again = load_run(run.path)
    assert again.config == CONFIG
    assert {"python", "torch", "numpy", "excite", "system", "threads", "commit"} <= again.environment.keys()
    assert again.status == "running"


def test_frame_has_step_name_value_in_order(run: Run) -> None:
    run.log(2, {"b/x": 1.0, "a/x": 2.0})
    run.log(1, {"b/x": 3.0})
    frame = run.frame()
    assert list(frame.columns) == ["step", "name", "value"]
    assert list(frame.itertuples(index=False, name=None)) == [(1, "b/x", 3.0), (2, "a/x", 2.0), (2, "b/x", 1.0)]
    assert frame["step"].dtype == np.int64
    assert frame["value"].dtype == np.float64


def test_an_empty_frame_has_its_columns(run: Run) -> None:
    assert list(run.frame().columns) == ["step", "name", "value"]
    assert len(run.frame()) == 0


def test_values_come_back_exactly(run: Run) -> None:
    values = [0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308, 1 / 3]
    for step, value in enumerate(values):
        run.log(step, {"q/v": value})
    steps, read = load_run_after(run).series("q/v")
    assert steps.tolist() == list(range(len(values)))
    assert np.array_equal(read, np.array(values), equal_nan=True)


def load_run_after(run: Run) -> Run:
    run.flush()
    return load_run(run.path)


def test_tensors_and_numpy_scalars_are_numbers(run: Run) -> None:
    run.log(np.int64(0), {"a/b": torch.tensor(1.5), "a/c": np.float32(2.5), "a/d": torch.tensor([3.5]), "a/e": 4})
    assert run.frame()["value"].tolist() == [1.5, 2.5, 3.5, 4.0]


@pytest.mark.parametrize(
    ("step", "values"),
    [(-1, {"a/b": 1.0}), (1.5, {"a/b": 1.0}), (True, {"a/b": 1.0}), (0, {"": 1.0}), (0, {"a\nb": 1.0}), (0, {"/a": 1.0}),
     (0, {"a/b": "x"}), (0, {"a/b": torch.zeros(2)}), (0, {"a/b": np.zeros(0)}), (0, {3: 1.0}), (0, {"a/b": None}),
     (2**63, {"a/b": 1.0}), (np.uint64(2**63), {"a/b": 1.0}), (0, {"a/b": 10**400}), (0, {"a/b": "1.5"}),
     (0, {"a/b": torch.tensor(1j)}), (0, {"a/\ud800": 1.0})],
)  # fmt: skip
def test_bad_metrics_are_refused_and_nothing_is_logged(run: Run, step, values) -> None:
    with pytest.raises(InputError):
        run.log(step, {"good/one": 1.0, **values})
    assert len(run.frame()) == 0


def test_the_largest_step_of_sqlite_is_stored(run: Run) -> None:
    run.log(2**63 - 1, {"a/b": 1.0})
    run.rewind(2**70)
    assert run.series("a/b")[0].tolist() == [2**63 - 1]


def test_metrics_that_are_no_dict_are_refused(run: Run) -> None:
    with pytest.raises(InputError, match="dict of numbers by name"):
        run.log(1, [1.0])  # type: ignore[arg-type]


def test_a_row_that_sqlite_refuses_is_named_and_the_rest_stored(run: Run) -> None:
    run.log(1, {"a/b": 1.0})
    run._metrics._buffer["bad/name", 2**63] = (2.0, 0.0)  # as if the check had missed them
    run._metrics._buffer["bad/value", 3] = (object(), 0.0)  # type: ignore[assignment]
    run.log(4, {"a/b": 4.0})
    with pytest.warns(UserWarning, match=r"'bad/name' at step 9223372036854775808.* and 1 more: dropped"):
        run.flush()
    run.log(5, {"a/b": 5.0})
    run.flush()
    assert run.series("a/b")[0].tolist() == [1, 4, 5]
    assert run.names() == ["a/b"]


def test_a_replayed_step_overwrites_itself(run: Run) -> None:
    run.log(1, {"a/b": 1.0})
    run.flush()
    run.log(1, {"a/b": 2.0})
    assert run.series("a/b")[1].tolist() == [2.0]


def test_rewind_drops_later_steps_from_disk_and_buffer(run: Run) -> None:
    run.log(1, {"a/b": 1.0})
    run.log(5, {"a/b": 1.0})
    run.flush()
    run.log(2, {"a/b": 1.0})
    run.log(6, {"a/b": 1.0})
    run.rewind(2)
    assert run.series("a/b")[0].tolist() == [1, 2]


@pytest.mark.slow
@given(
    steps=st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 60)), unique=True, max_size=40),
    before=st.integers(0, 70),
    every=st.integers(1, 20),
)
@settings(max_examples=25)
def test_thinning_keeps_the_first_of_every_so_many_steps(steps, before, every) -> None:
    expected, first = [], set()
    for name, step in sorted(steps):
        if step >= before or (name, step // every) not in first:
            expected.append((name, step))
        first.add((name, step // every))
    with TemporaryDirectory() as folder, Run.create(Path(folder) / "run", {}) as run:
        for name, step in steps:
            run.log(step, {name: 1.0})
        assert run.thin(before, every) == len(steps) - len(expected)
        frame = run.frame()
    assert sorted(zip(frame["name"], frame["step"])) == expected


def test_thinning_shrinks_the_file_and_the_run_can_continue(run: Run) -> None:
    for step in range(20_000):
        run.log(step, {"a/b": 1.0})
    run.save_checkpoint(19_999, {})
    run.close()
    before = (run.path / "metrics.db").stat().st_size
    with Run.open(run.path, "a") as again:
        assert again.thin(19_000, 100) == 190 * 99
        assert again.load_checkpoint()[0] == 19_999
    assert (run.path / "metrics.db").stat().st_size < before / 5
    with pytest.raises(RunError, match="closed"):
        run.thin(1, 1)
    with Run.open(run.path, "a") as again, pytest.raises(InputError, match="every"):
        again.thin(10, 0)


def test_an_unknown_metric_names_a_near_one(run: Run) -> None:
    run.log(0, {"rank/effective/conv1": 1.0})
    with pytest.raises(RunError, match="did you mean 'rank/effective/conv1'"):
        run.series("rank/efective/conv1")


def test_a_hundred_thousand_values_take_few_transactions(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each transaction waits for the disk: values are written in batches of 4,096."""
    monkeypatch.setattr("excite.runs.metrics._FLUSH_SECONDS", math.inf)
    transactions: list[str] = []
    run._metrics._require_open().set_trace_callback(
        lambda sql: transactions.append(sql) if sql.startswith("BEGIN") else None
    )
    for step in range(20_000):
        run.log(step, {"a/b": 1.0, "a/c": 2.0, "a/d": 3.0, "a/e": 4.0, "a/f": 5.0})
    run.flush()
    assert len(transactions) == 25
    assert len(run.series("a/c")[0]) == 20_000


def test_readers_see_flushed_values_while_the_writer_lives(run: Run) -> None:
    reader = load_run(run.path)
    run.log(1, {"a/b": 1.0})
    run.flush()
    assert reader.series("a/b")[0].tolist() == [1]
    run.log(2, {"a/b": 1.0})
    run.flush()
    assert reader.series("a/b")[0].tolist() == [1, 2]
    reader.close()


@pytest.mark.slow
def test_values_reach_readers_within_seconds_without_flush(run: Run) -> None:
    run.log(1, {"a/b": 1.0})
    time.sleep(1.1)
    run.log(2, {"a/b": 1.0})
    assert load_run(run.path).series("a/b")[0].tolist() == [1, 2]


def test_artifacts_come_back(run: Run) -> None:
    value = {"values": [0.1, math.inf], "name": "test"}
    assert run.write_json("margins", value) == run.path / "artifacts" / "margins.json"
    assert load_run(run.path).read_json("margins") == value
    with pytest.raises(RunError, match="missing"):
        run.read_json("other")


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "/etc/x"])
def test_artifact_names_cannot_leave_the_folder(run: Run, name: str) -> None:
    with pytest.raises(InputError):
        run.write_json(name, 1)


def test_artifacts_that_are_not_json_are_refused(run: Run) -> None:
    with pytest.raises(InputError, match="JSON"):
        run.write_json("a", {"x": object()})
    assert list((run.path / "artifacts").iterdir()) == []


def test_json_files_are_plain(run: Run) -> None:
    assert json.loads((run.path / "config.json").read_text()) == CONFIG
    assert json.loads((run.path / "run.json").read_text())["format"] == "excite-run"
