from __future__ import annotations

import errno
import math
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from excite.data import Dataset, load
from excite.errors import InputError, RunError, TrainingStopped
from excite.excitation import PersistentExcitation, Stages
from excite.runs import Run, load_run
from excite.train import TrainingResult, build, fit, squared_error


@pytest.fixture(scope="module")
def data() -> Dataset:
    return load("moons", train=60, test=30)


def network() -> nn.Module:
    return build("mlp", inputs=2, widths=(8,), seed=1)


def run_fit(
    data: Dataset, model: nn.Module | None = None, loss: Any = None, **options: Any
) -> tuple[nn.Module, TrainingResult]:
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = {"epochs": 3, "batch": 25, **options}
    return model, fit(model, data, loss or squared_error(model), optimizer, **settings)


def same_weights(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values()))


def test_the_loop_is_the_obvious_one(data: Dataset) -> None:
    """Against a loop written out: the order comes from the seed, everything else is plain SGD."""
    from excite.train.batches import Shuffle

    seen: list[Tensor] = []
    model = network()
    loss = squared_error(model)

    def watched(x: Tensor, y: Tensor) -> Tensor:
        seen.append(x)
        return loss(x, y)

    run_fit(data, model, watched, epochs=2)
    assert [len(x) for x in seen] == [25, 25, 10] * 2
    for epoch in (seen[:3], seen[3:]):  # each epoch sees every point once
        assert torch.equal(torch.cat(epoch).sort(0).values, data.x_train.sort(0).values)
    assert not torch.equal(seen[0], seen[3])
    slow = network()
    optimizer = torch.optim.SGD(slow.parameters(), lr=0.1, momentum=0.9)
    shuffle = Shuffle(60, 25, 0)
    for _ in range(2):
        for at in shuffle.epoch(torch.device("cpu")):
            optimizer.zero_grad()
            ((slow(data.x_train[at]).squeeze(1) - data.y_train[at]) ** 2).mean().backward()
            optimizer.step()
    assert same_weights(model, slow)


def test_the_seed_decides(data: Dataset) -> None:
    assert same_weights(run_fit(data, seed=1)[0], run_fit(data, seed=1)[0])
    assert not same_weights(run_fit(data, seed=1)[0], run_fit(data, seed=2)[0])


def test_the_result_is_independent_of_the_global_random_state(data: Dataset) -> None:
    def dropout() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))

    torch.manual_seed(1)
    one, _ = run_fit(data, dropout())
    torch.manual_seed(2)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    two, _ = run_fit(data, dropout())
    assert same_weights(one, two)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert np.array_equal(before[2], np.random.get_state()[1])  # noqa: NPY002


def test_modes_stay_and_evaluation_does_not_touch_statistics(data: Dataset) -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    model[1].eval()  # frozen statistics
    statistics = model[1].running_mean.clone()
    run_fit(data, model)
    assert [m.training for m in model.modules()] == [True, True, False, True, True]
    assert torch.equal(statistics, model[1].running_mean)


def test_what_is_logged(data: Dataset, tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", {}) as run:
        model, fitted = run_fit(data, run=run)
    run = load_run(tmp_path / "run")
    assert run.names() == ["accuracy/test", "accuracy/train", "loss/step"]
    assert run.series("loss/step")[0].tolist() == list(range(1, 10))
    assert run.series("accuracy/test")[0].tolist() == [0, 3, 6, 9]
    assert run.series("loss/step")[1][-1] == fitted.loss
    with torch.no_grad():
        right = ((model(data.x_test).squeeze(1) > 0.5).long() == data.y_test).double().mean().item()
    assert run.series("accuracy/test")[1][-1] == fitted.test_accuracy == right
    assert run.status == "done"
    assert [(c.step, c.final) for c in run.checkpoints()] == [(3, False), (6, False), (9, True)]


def test_training_learns(data: Dataset) -> None:
    _, fitted = run_fit(data, epochs=60)
    assert fitted.test_accuracy is not None
    assert fitted.test_accuracy > 0.85


def test_progress_counts_every_step(data: Dataset) -> None:
    seen: list[tuple[str, int, int]] = []
    run_fit(data, progress=lambda *a: seen.append(a))
    assert seen == [("training", i, 9) for i in range(1, 10)]


def test_regression_and_sets_without_test_points() -> None:
    frequencies = load("frequencies")
    model = build("mlp", inputs=10)
    _, fitted = run_fit(frequencies, model)
    assert (fitted.train_accuracy, fitted.test_accuracy) == (None, None)
    _, fitted = run_fit(load("linear-margins-2"), network())
    assert fitted.train_accuracy is not None
    assert fitted.test_accuracy is None


class Recorder:
    """A schedule that notes when it is moved."""

    def __init__(self) -> None:
        self.fractions: list[float] = []
        self.at_step: list[float] = []

    def advance(self, fraction: float) -> None:
        self.fractions.append(fraction)

    def predict(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), dtype=torch.long)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_the_authors_schedule_changes_at_epochs_10_20_30(data: Dataset) -> None:
    recorder = Recorder()
    run_fit(data, epochs=40, batch=60, excitation=recorder)
    assert recorder.fractions == [epoch / 40 for epoch in range(41)]
    stages = [Stages(0.3, 4).share(f) for f in recorder.fractions[:40]]
    assert stages == [0.0] * 10 + [1 / 3] * 10 + [2 / 3] * 10 + [1.0] * 10


@pytest.mark.parametrize("stages", [2, 3, 4, 7])
def test_stages_are_equally_long(stages: int) -> None:
    shares = [Stages(1.0, stages).share(epoch / (stages * 49)) for epoch in range(stages * 49)]
    assert shares == [s / (stages - 1) for s in range(stages) for _ in range(49)]


def test_excitation_trains_and_is_saved(data: Dataset, tmp_path: Path) -> None:
    model = network()
    pe = PersistentExcitation(model, Stages(0.05, 3))
    with Run.create(tmp_path / "run", {}) as run:
        run_fit(data, model, pe.loss, run=run, excitation=pe)
        assert run.load_checkpoint()[1]["excitation"] == {"progress": 1.0}
        assert run.load_checkpoint(6)[1]["excitation"] == {"progress": pytest.approx(1 / 3)}
    plain, _ = run_fit(data)
    assert not same_weights(model, plain)


def test_radius_zero_is_plain_training(data: Dataset) -> None:
    model = network()
    run_fit(data, model, PersistentExcitation(model, 0.0).loss)
    assert same_weights(model, run_fit(data)[0])


class Stop(Exception):
    pass


def stopping(loss: Any, at: int, error: BaseException | None = None, value: float | None = None) -> Any:
    calls = 0

    def wrapped(x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == at and error is not None:
            raise error
        result = loss(x, y)
        return result * value if calls == at and value is not None else result

    return wrapped


@pytest.mark.slow
@pytest.mark.parametrize("at", range(1, 10))
@pytest.mark.parametrize("every", [1, 2, "1 epoch", "100 steps"])
def test_continued_from_any_step_is_identical(data: Dataset, tmp_path: Path, at: int, every: int | str) -> None:
    with Run.create(tmp_path / "whole", {}) as whole:
        expected, fitted = run_fit(data, run=whole, checkpoint_every=every)
        frame = whole.frame()
    model = network()
    with pytest.raises(Stop), Run.create(tmp_path / "run", {}) as run:
        run_fit(data, model, stopping(squared_error(model), at, Stop("x")), run=run, checkpoint_every=every)
    assert load_run(tmp_path / "run").status == "failed"
    with Run.create(tmp_path / "run", {}, resume=True) as run:
        model, again = run_fit(data, run=run, checkpoint_every=every)
        assert run.frame().equals(frame)
    assert same_weights(model, expected)
    assert again == replace(fitted, resumed_from=again.resumed_from)
    done = {1: at - 1, 2: (at - 1) // 2 * 2, "1 epoch": (at - 1) // 3 * 3, "100 steps": 0}[every]
    assert again.resumed_from == (done or None)


def test_restored_momentum_has_the_layout_of_its_weight(tmp_path: Path) -> None:
    images = load("digits", classes=(0, 1), train=20, test=10)
    for _ in range(2):  # the second call restores the end of the first
        model = build("small-cnn").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with Run.create(tmp_path / "run", {}, resume=True) as run:
            result = fit(model, images, squared_error(model), optimizer, epochs=1, batch=10, run=run)
    assert result.resumed_from == result.steps
    weight = next(p for p in model.parameters() if p.shape == (16, 8, 3, 3))
    assert weight.stride() != weight.contiguous().stride()
    for weight, state in optimizer.state.items():
        assert state["momentum_buffer"].stride() == weight.stride()


@pytest.mark.parametrize(("every", "kept"), [("1 epoch", [3]), ("100 steps", [])])
def test_rows_a_killed_process_logged_too_late_are_dropped(
    data: Dataset, tmp_path: Path, every: str, kept: list[int]
) -> None:
    model = network()
    with pytest.raises(Stop), Run.create(tmp_path / "run", {}) as run:
        run_fit(data, model, stopping(squared_error(model), 6, Stop("x")), run=run, checkpoint_every=every)
    with Run.open(tmp_path / "run", "a") as run:
        run.log(3, {"other/value": 1.0})
        run.log(5, {"other/value": 1.0})
    with Run.create(tmp_path / "run", {}, resume=True) as run:
        run_fit(data, run=run, checkpoint_every=every)
        frame = run.frame()
    assert frame[frame["name"] == "other/value"]["step"].tolist() == kept


def test_a_finished_run_is_not_trained_again(data: Dataset, tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", {}) as run:
        expected, fitted = run_fit(data, run=run)
        model, again = run_fit(data, loss=stopping(None, 1, Stop("trained again")), run=run)
    assert same_weights(model, expected)
    assert again == replace(fitted, resumed_from=9)
    assert load_run(tmp_path / "run").status == "done"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_not_finite_stops_and_the_good_checkpoint_stays(data: Dataset, tmp_path: Path, value: float) -> None:
    model = network()
    with (
        pytest.raises(TrainingStopped, match=r"at step 5.*checkpoint is that of step 4") as error,
        Run.create(tmp_path / "run", {}) as run,
    ):
        run_fit(data, model, stopping(squared_error(model), 5, value=value), run=run, checkpoint_every=2)
    assert "\n" not in str(error.value)
    run = load_run(tmp_path / "run")
    assert run.status == "failed"
    assert run.reason is not None
    assert "step 5" in run.reason
    step, state = run.load_checkpoint()
    assert step == 4
    assert all(bool(torch.isfinite(t).all()) for t in state["model"].values())
    assert not math.isfinite(run.series("loss/step")[1][-1])
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())  # the bad loss did not reach the weights


def test_weights_that_are_not_finite_are_never_saved(data: Dataset, tmp_path: Path) -> None:
    model = network()
    loss = squared_error(model)
    calls = 0

    def poisoned(x: Tensor, y: Tensor) -> Tensor:
        """At step 3 a finite loss with a gradient of NaN: sqrt(0) times zero."""
        nonlocal calls
        calls += 1
        extra = sum((p.sum() * 0).square().sqrt() for p in model.parameters()) if calls == 3 else 0.0
        return loss(x, y) + extra

    with (
        pytest.raises(TrainingStopped, match="weights are not finite after step 3"),
        Run.create(tmp_path / "run", {}) as run,
    ):
        run_fit(data, model, poisoned, run=run, checkpoint_every=1)
    assert load_run(tmp_path / "run").load_checkpoint()[0] == 2


def test_an_interrupted_training_is_stopped_and_can_be_continued(data: Dataset, tmp_path: Path) -> None:
    model = network()
    with pytest.raises(KeyboardInterrupt), Run.create(tmp_path / "run", {}) as run:
        run_fit(data, model, stopping(squared_error(model), 5, KeyboardInterrupt()), run=run)
    stopped = load_run(tmp_path / "run")
    assert (stopped.status, stopped.reason) == ("stopped", "interrupted: start it again to continue")
    with Run.create(tmp_path / "run", {}, resume=True) as run:
        model, fitted = run_fit(data, run=run)
    assert fitted.resumed_from == 3
    assert same_weights(model, run_fit(data)[0])


def test_a_full_disk_stops_training_with_the_last_checkpoint(data: Dataset, tmp_path: Path, monkeypatch) -> None:
    fsync, calls = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with (
        pytest.raises(TrainingStopped, match=r"disk is full.*checkpoint is that of step 3") as error,
        Run.create(tmp_path / "run", {}) as run,
    ):
        sync = "excite._core.files.sync_folder"
        monkeypatch.setattr(sync, lambda folder: None)
        monkeypatch.setattr(os, "fsync", full)
        run_fit(data, run=run)
    monkeypatch.undo()
    assert "\n" not in str(error.value)
    assert load_run(tmp_path / "run").load_checkpoint()[0] == 3
    with Run.create(tmp_path / "run", {}, resume=True) as run:
        model, _ = run_fit(data, run=run)
    assert same_weights(model, run_fit(data)[0])


def test_a_damaged_checkpoint_is_a_run_error_before_training(data: Dataset, tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", {}) as run:
        run_fit(data, run=run)
        path = run.checkpoints()[-1].path
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(RunError, match="delete it to continue from step 6"), Run.open(tmp_path / "run", "a") as run:
        run_fit(data, loss=stopping(None, 1, Stop("trained")), run=run)
    path.unlink()
    with Run.open(tmp_path / "run", "a") as run:
        model, fitted = run_fit(data, run=run)
    assert fitted.resumed_from == 6
    assert same_weights(model, run_fit(data)[0])


def test_another_model_or_other_settings_are_refused(data: Dataset, tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", {}) as run:
        run_fit(data, run=run)
        with pytest.raises(RunError, match="epochs = 3, not 4"):
            run_fit(data, run=run, epochs=4)
        with pytest.raises(RunError, match="another model") as error:
            run_fit(data, build("mlp", inputs=2, widths=(9,)), run=run)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"epochs": 0}, "epochs"), ({"epochs": 2.0}, "epochs"), ({"batch": 0}, "batch"), ({"batch": True}, "batch"),
     ({"seed": -1}, "seed"), ({"checkpoint_every": "often"}, "checkpoint_every"), ({"checkpoint_every": 0}, "checkpoint")],
)  # fmt: skip
def test_bad_settings_are_refused(data: Dataset, options: dict, match: str) -> None:
    with pytest.raises(InputError, match=match):
        run_fit(data, **options)


def test_bad_data_is_refused(data: Dataset) -> None:
    with pytest.raises(InputError, match="NaN or infinite"):
        run_fit(replace(data, x_train=data.x_train / 0))
    with pytest.raises(InputError, match="60 points and 59 labels"):
        run_fit(replace(data, y_train=data.y_train[1:]))
    with pytest.raises(InputError, match="at least one training point"):
        run_fit(replace(data, x_train=data.x_train[:0], y_train=data.y_train[:0]))
    with pytest.raises(InputError, match="one number with a gradient"):
        run_fit(data, loss=lambda x, y: x.sum(1))
