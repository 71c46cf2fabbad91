"""The training loop. All ways to train lead here.

fit                             one trainer
train, train_across             one trainer built from a config; `train_across` on every rank of a process group
train_together, fit_together    several trainers whose networks share one vectorized step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from excite.train.step import Step
from excite.train.stopping import between_steps

if TYPE_CHECKING:
    from excite.train.settings import TrainingResult
    from excite.train.trainer import Trainer

Update = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def run_loop(trainers: Sequence[Trainer], update: Update, step: Step) -> list[TrainingResult]:
    """Takes trainers that have the same number of steps left through all of them.

    Args:
        trainers: Trainers that have begun, at the same epoch and batch.
        update: Takes one step; from the indices of each trainer's batch to each trainer's loss before the update.
        step: The step that `update` takes, which knows whether it was captured as a CUDA graph.

    Returns:
        The result of each trainer.
    """
    first = trainers[0]
    with between_steps():
        while first.epoch < first.epochs:
            for batches in zip(*(trainer.open_epoch() for trainer in trainers)):
                for trainer, loss in zip(trainers, update(batches)):
                    trainer.after_update(loss)
                stop_if_requested(trainers)
            for trainer in trainers:
                trainer.close_epoch()
            stop_if_requested(trainers)
        # A signal that arrives now waits for the final checkpoint.
        return [trainer.finish(step.why_not, len(trainers)) for trainer in trainers]


def stop_if_requested(trainers: Sequence[Trainer]) -> None:
    """Ends training with a checkpoint of every trainer if a stop was requested. An epoch is finished first."""
    first = trainers[0]
    if not any(trainer.stop_requested for trainer in trainers):
        return
    if first.position == first.per_epoch or first.epoch == first.epochs:
        return
    for trainer in trainers:
        trainer.checkpoint_now()
    raise first.interrupt()
