"""Sweeps: combinations, names, the table, resume, the same bits on every executor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from excite.errors import InputError, RunError
from excite.jobs.executors import ProcessExecutor
from excite.jobs.sweep import plan, run_sweep
from excite.runs import load_run
from excite.runs.lock import Lock
from jobs.sleep_jobs import settings

GRID = {"optimizer.lr": [0.001, 0.5], "epochs": [2, 3]}


def test_a_grid_is_every_combination_with_every_seed(tmp_path: Path) -> None:
    sweep = plan(settings(over=GRID, seeds=2), tmp_path)
    assert [(job.config.optimizer.lr, job.config.epochs, job.config.seed) for job in sweep.jobs] == [
        (lr, epochs, seed) for lr in (0.001, 0.5) for epochs in (2, 3) for seed in (0, 1)
    ]
    assert len({job.folder for job in sweep.jobs}) == 8


def test_combinations_with_similar_names_have_own_folders(tmp_path: Path) -> None:
    sweep = plan(settings(over={"optimizer.lr": [1e-30, 1e30]}), tmp_path)
    assert len({job.folder for job in sweep.jobs}) == 2
    assert sweep.jobs[0].folder.name == "optimizer.lr-1e-30-0"


def test_ranges_on_a_grid_and_at_random(tmp_path: Path) -> None:
    over = {"optimizer.lr": {"low": 0.01, "high": 1.0, "log": True, "count": 3}, "excitation.radius": [0.1, 0.2]}
    rates = sorted({job.config.optimizer.lr for job in plan(settings(over=over), tmp_path).jobs})
    assert rates == pytest.approx([0.01, 0.1, 1.0])
    drawn = plan(settings(over=over, method="random", budget=5), tmp_path)
    assert len(drawn.combinations) == 5
    assert all(0.01 <= job.config.optimizer.lr <= 1 for job in drawn.jobs)
    assert [job.folder for job in plan(settings(over=over, method="random", budget=5), tmp_path).jobs] == [
        job.folder for job in drawn.jobs
    ]


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ({"over": {}}, "sweep.over: expected keys"),
        ({"over": {"optimizer.lr": []}}, "sweep.over: expected keys"),
        ({"over": {"optimizer.rate": [1.0]}}, "unknown key 'optimizer.rate'"),
        ({"over": {"epochs.more": [1]}}, "'epochs' is not a table"),
        ({"over": {"optimizer.lr": {"low": 0.0, "high": 1.0, "log": True}}}, "low > 0 with log"),
        ({"over": {"optimizer.lr": {"low": 2.0, "high": 1.0}}}, "expected low < high"),
        ({"method": "random"}, "sweep.budget is missing"),
        ({"over": GRID, "budget": 3}, "the grid has 4 combinations, the budget is 3"),
        ({"goal": "most"}, "sweep.goal"),
        ({"sedes": 3}, "sweep.sedes"),
        ({"over": {"seed": [0, 1]}}, "seed: every combination is trained with seeds 0"),
    ],
)
def test_errors_are_raised_before_anything_is_trained(sweep: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        plan(settings(**sweep), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_rows_are_sorted_and_nothing_is_trained_twice(tmp_path: Path) -> None:
    sweep = plan(settings(over=GRID, seeds=2), tmp_path)
    result = run_sweep(sweep, workers=1)
    means = [row.mean for row in result.rows]
    assert means == sorted(means, reverse=True)
    assert str(result).splitlines()[0].split() == ["optimizer.lr", "epochs", "accuracy/test,", "mean", "of", "seeds", "lowest", "highest", "seeds"]  # fmt: skip
    stamps = {job.folder: (job.folder / "run.json").stat().st_mtime_ns for job in sweep.jobs}
    again = run_sweep(sweep, workers=1)
    assert [row.scores for row in again.rows] == [row.scores for row in result.rows]
    assert stamps == {job.folder: (job.folder / "run.json").stat().st_mtime_ns for job in sweep.jobs}


@pytest.mark.slow
def test_worker_processes_give_the_same_bits(tmp_path: Path) -> None:
    here, there = (plan(settings(over=GRID), tmp_path / name) for name in ("here", "there"))
    run_sweep(here, workers=1)
    run_sweep(there, executor=ProcessExecutor(2))
    for one, two in zip(here.jobs, there.jobs):
        with load_run(one.folder) as a, load_run(two.folder) as b:
            assert a.series("loss/step")[1].tolist() == b.series("loss/step")[1].tolist()
            weights = [run.load_checkpoint()[1]["model"] for run in (a, b)]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_second_start_of_the_same_sweep_is_refused(tmp_path: Path) -> None:
    sweep = plan(settings(over=GRID), tmp_path)
    lock = Lock(tmp_path / "lock", tmp_path)
    try:
        with pytest.raises(RunError, match="another process is writing to"):
            run_sweep(sweep)
    finally:
        lock.release()


def test_a_failed_training_is_reported_and_the_others_compared(tmp_path: Path) -> None:
    sweep = plan(settings(over={"optimizer.lr": [0.5, 1e30]}), tmp_path)
    result = run_sweep(sweep, workers=1)
    assert result.failed is not None
    assert "optimizer.lr-1e-30-0" in result.failed
    assert [len(row.scores) for row in result.rows] == [1, 0]
    assert "–" in str(result)


def test_earlier_names_still_work(tmp_path: Path) -> None:
    sweep = plan(settings(), tmp_path)
    calls: list[tuple[str, float, float]] = []
    with pytest.warns(DeprecationWarning, match=r"run_sweep\((progress|engine)=...\) is deprecated"):
        result = run_sweep(sweep, 1, progress=lambda *call: calls.append(call), engine=None)  # type: ignore[call-arg]
    assert calls[-1][1:] == (2, 2)
    with pytest.warns(DeprecationWarning, match="Sweep.tasks is deprecated: use Sweep.jobs"):
        assert sweep.tasks == sweep.jobs
    with pytest.warns(DeprecationWarning, match="SweepRow.found is deprecated"):
        assert result.rows[0].found == result.rows[0].scores
