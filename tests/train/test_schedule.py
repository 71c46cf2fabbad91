"""The learning rate rises, falls, and does not depend on interruptions; passes in half precision train as well."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from excite.train.from_config import train
from excite.train.schedule import RISE, RateSchedule, one_cycle, step_decay

CONFIG = {
    "data": {"name": "digits", "classes": [0, 1], "train": 60, "test": 20},
    "model": {"name": "small-cnn"},
    "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9},
    "epochs": 4,
    "batch": 20,
    "watch": False,
    "checkpoint_every": "2 steps",
}


def test_one_cycle_is_two_straight_lines():
    assert one_cycle(0) == 0
    assert one_cycle(RISE) == 1
    assert one_cycle(1) == 0
    assert one_cycle(RISE / 2) == pytest.approx(0.5)
    assert one_cycle((1 + RISE) / 2) == pytest.approx(0.5)


def test_rates_follow_it_group_by_group_and_never_vanish():
    a, b = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 0.1}])
    schedule, seen = RateSchedule("one-cycle", optimizer), []
    for step in range(9):
        schedule(step, 9)
        seen.append([group["lr"] for group in optimizer.param_groups])
    assert seen[1] == pytest.approx([1.0, 0.1])  # a fifth of the way
    assert all(first == pytest.approx(10 * second) and first > 0 for first, second in seen)
    assert [first for first, _ in seen[1:]] == sorted((first for first, _ in seen[1:]), reverse=True)


def test_a_training_that_was_stopped_ends_with_the_same_weights(tmp_path, monkeypatch):
    config = {**CONFIG, "schedule": "one-cycle"}
    whole = train(config, tmp_path / "whole")

    def stop(phase: str, done: int, total: int) -> None:
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "broken", progress=stop)
    broken = train(config, tmp_path / "broken")
    for name, weight in whole.load_checkpoint()[1]["model"].items():
        assert torch.equal(weight, broken.load_checkpoint()[1]["model"][name]), name
    assert whole.load_checkpoint()[1]["optimizer"]["param_groups"][0]["lr"] < 0.02
    constant = train(CONFIG, tmp_path / "constant").load_checkpoint()[1]["model"]
    assert any(not torch.equal(constant[k], v) for k, v in whole.load_checkpoint()[1]["model"].items())


def test_the_time_of_training_is_kept(tmp_path):
    taken = train(CONFIG, tmp_path / "run").read_json("time")
    assert taken["device"] == "cpu"
    assert 0 < taken["seconds"] < math.inf
    assert "CUDA" in taken["why_not_captured"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [{}, {"excitation": {"radius": 0.01}}, {"adversarial": {"radius": 0.01, "steps": 2}}]
)
def test_half_precision_trains_weights_in_single(tmp_path, method):
    run = train({**CONFIG, **method, "epochs": 15, "precision": "bfloat16"}, tmp_path / "run")
    state = run.load_checkpoint()[1]["model"]
    assert all(weight.dtype == torch.float32 for weight in state.values())
    assert run.series("accuracy/test")[1][-1] > 0.8


def test_step_decay_falls_at_half_and_at_three_quarters():
    assert [step_decay(share) for share in (0, 0.49, 0.5, 0.74, 0.75, 1)] == [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
