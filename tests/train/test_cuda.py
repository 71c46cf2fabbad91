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
