"""The parts of the loop that differ on a GPU: losses fetched in groups, random state of the device, resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from excite.data import load
from excite.errors import TrainingStopped
from excite.runs import Run, load_run
from excite.train import fit, squared_error
from excite.train.from_config import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Stop(Exception):
    pass


def job(path: Path, stop_at: int = 0, nan_at: int = 0, resume: bool = False) -> nn.Module:
    data = load("moons", train=200, test=100)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1)).cuda()
    loss, calls = squared_error(model), 0

    def counted(x: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise Stop
        return loss(x, y) * (math.nan if calls == nan_at else 1.0)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Run.create(path, {}, resume=resume) as run:
        fit(model, data, counted, optimizer, epochs=12, batch=20, run=run, checkpoint_every="7 steps")
    return model


def test_continued_training_has_the_same_dropout_and_losses(tmp_path: Path) -> None:
    before = torch.cuda.get_rng_state()
    whole = job(tmp_path / "whole")
    assert torch.equal(before, torch.cuda.get_rng_state())
    with pytest.raises(Stop):
        job(tmp_path / "run", stop_at=60)
    model = job(tmp_path / "run", resume=True)
    one, two = load_run(tmp_path / "whole"), load_run(tmp_path / "run")
    for name in ("loss/step", "accuracy/train", "accuracy/test"):
        (steps, values), (others, again) = one.series(name), two.series(name)
        assert steps.tolist() == others.tolist()
        # Sums on a GPU may add in another order; other dropout masks would differ by far more.
        assert abs(values - again).max() < 1e-5
    for a, b in zip(whole.parameters(), model.parameters()):
        assert torch.allclose(a, b, atol=1e-5)
    assert next(iter(model.parameters())).is_cuda


def test_a_nan_is_found_at_its_step_with_losses_fetched_later(tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped, match=r"at step 45.*checkpoint is that of step 42"):
        job(tmp_path / "run", nan_at=45)
    run: Any = load_run(tmp_path / "run")
    assert run.series("loss/step")[0].tolist() == list(range(1, 46))
    assert all(bool(torch.isfinite(t).all()) for t in run.load_checkpoint()[1]["model"].values())


IMAGES: dict[str, Any] = {
    "data": {"name": "digits", "classes": [0, 1], "train": 60, "test": 20},
    "model": {"name": "small-cnn"},
    "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    "epochs": 6,
    "batch": 20,
    "watch": False,
    "device": "cuda",
}


@pytest.mark.parametrize(
    "method",
    [{}, {"excitation": {"radius": 0.01}}, {"adversarial": {"radius": 0.01, "steps": 2, "random_start": False}}],
    ids=["plain", "excitation", "adversarial"],
)
def test_a_bfloat16_training_continues_with_its_momentum(tmp_path: Path, method: dict[str, Any]) -> None:
    """Momentum is restored in the layout of channels last, which a fused optimizer requires."""
    config = {**IMAGES, **method, "precision": "bfloat16", "checkpoint_every": "2 steps"}

    def interrupt(phase: str, done: int, total: int) -> None:
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", interrupt)
    part = load_run(tmp_path / "run")
    assert part.status == "stopped"
    whole, run = train(config, tmp_path / "whole"), train(config, tmp_path / "run")
    assert whole.read_json("time")["why_not_captured"] is None
    steps, losses = whole.series("loss/step")
    again, resumed = run.series("loss/step")
    assert steps.tolist() == again.tolist() == list(range(1, 19))
    # Kernels in bfloat16 may sum in another order; a momentum that is lost or permuted changes the losses by far more.
    assert abs(losses - resumed).max() < 0.02
    one, two = (r.load_checkpoint()[1]["optimizer"]["state"] for r in (whole, run))
    for key in one:
        difference = (one[key]["momentum_buffer"] - two[key]["momentum_buffer"]).norm()
        assert difference < 0.1 * one[key]["momentum_buffer"].norm() + 1e-6, key


@pytest.mark.parametrize("method", ["excitation", "adversarial"])
def test_a_captured_training_that_collapses_is_named(tmp_path: Path, method: str) -> None:
    """Replays of a captured step count on the device, and the end of an epoch reads the count."""
    with pytest.warns(UserWarning, match="the network is constant: for 2.. steps") as said:
        rate = {"name": "sgd", "lr": 1e-6}  # too small to learn: the loss stays that of the perturbed start
        run = train({**IMAGES, method: {"radius": 1.0, "steps": 1}, "optimizer": rate, "epochs": 80}, tmp_path / "run")
    assert run.read_json("time")["why_not_captured"] is None
    assert len([one for one in said if "constant" in str(one.message)]) == 1
