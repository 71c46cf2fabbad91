"""The loop: every batch of every epoch, for one trainer and for several, until a stop is requested."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from excite.train.loop import run_loop
from excite.train.step import Step

STEP = Step(lambda x, y: x, torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1))


class Fake:
    """A trainer of two epochs of three batches that writes down what it is asked to do."""

    epochs, per_epoch = 2, 3

    def __init__(self, stop_at: int | None = None) -> None:
        self.epoch = self.position = 0
        self.calls: list[Any] = []
        self.stop_at = stop_at

    @property
    def stop_requested(self) -> bool:
        return self.stop_at == sum(call == "update" for call in self.calls)

    def open_epoch(self) -> list[Tensor]:
        return list(torch.arange(3))[self.position :]

    def after_update(self, loss: Tensor) -> None:
        self.calls.append("update")
        self.position += 1

    def close_epoch(self) -> None:
        self.calls.append("epoch")
        self.epoch, self.position = self.epoch + 1, 0

    def checkpoint_now(self) -> None:
        self.calls.append("checkpoint")

    def interrupt(self) -> BaseException:
        return KeyboardInterrupt()

    def finish(self, why_not: str | None, together: int) -> int:
        return together


def run(*trainers: Fake) -> list[Any]:
    return run_loop(trainers, lambda batches: batches, STEP)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 3])
def test_all_batches_of_all_epochs(count: int) -> None:
    trainers = [Fake() for _ in range(count)]
    assert run(*trainers) == [count] * count
    for trainer in trainers:
        assert trainer.calls == [*["update"] * 3, "epoch"] * 2


def test_a_stop_checkpoints_every_trainer() -> None:
    trainers = [Fake(), Fake(stop_at=2)]
    with pytest.raises(KeyboardInterrupt):
        run(*trainers)
    assert [trainer.calls for trainer in trainers] == [["update", "update", "checkpoint"]] * 2


def test_an_epoch_is_finished_before_a_stop() -> None:
    trainer = Fake(stop_at=3)
    with pytest.raises(KeyboardInterrupt):
        run(trainer)
    assert trainer.calls == ["update", "update", "update", "epoch", "checkpoint"]


def test_a_stop_after_the_last_step_is_no_stop() -> None:
    assert run(Fake(stop_at=6)) == [1]
