"""Training with a loss of one's own: one model, one loss, one run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from excite._core.progress import Progress
from excite._core.randomness import own_randomness
from excite.runs.run import Run
from excite.train.predictions import Predict
from excite.train.settings import (
    Scheduled,
    TrainerSettings,
    TrainingData,
    TrainingResult,
    Watching,
)
from excite.train.step import Loss
from excite.train.trainer import Trainer


def fit(
    model: nn.Module, data: TrainingData, loss: Callable[[Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer, *,
    epochs: int, batch: int, seed: int = 0, run: Run | None = None, excitation: Scheduled | None = None, watch:
    Watching | None = None, checkpoint_every: int | str = "1 epoch", predict: Predict | None = None, progress:
    Progress | None = None, capture: bool = True,
) -> TrainingResult:  # fmt: skip
    """Trains a model with `loss(x, y)`, a mean over the batch.

    With a `run`, the loss of every step (`loss/step`) and the accuracies after every epoch (`accuracy/train`,
    `accuracy/test`) are logged and checkpoints are written; if the run has a checkpoint, training resumes from it.
    The training mode of every module and the global random state are left unchanged.

    In a process group (`excite.train.many_processes`) all ranks call `fit` with a model wrapped in
    DistributedDataParallel or sharded by FSDP2, the same data, and a `run` on rank 0 only. See
    `excite.train.distributed.data_parallel` for what is the same as on one process.

    Args:
        model: Model to train, in place, on its device.
        data: Training and test points, such as an `excite.data.Dataset`.
        loss: Function of a batch (x, y) that returns one number with a gradient.
        optimizer: Optimizer of the model's parameters.
        epochs: Number of passes over the training points.
        batch: Batch size; in a process group, over all ranks.
        seed: Seed of the order of the points and of everything random in the steps.
        run: Run to log to and to resume from, open for writing.
        excitation: Its `advance` is called once per epoch, and its state is saved in checkpoints.
        watch: Its `step(loss)` is called after every optimizer step; its state is saved if it has a `state_dict`.
        checkpoint_every: Number of steps, or text such as "10 steps" or "1 epoch".
        predict: Function from x to labels. Default: `excitation.predict`, else threshold 0.5 or, of several outputs, argmax.
        progress: Called as `progress("training", steps_done, steps_total)`.
        capture: On a GPU, run each step as one CUDA graph where possible.

    Returns:
        Number of steps, last loss and accuracies.

    Raises:
        InputError: If an argument is invalid, or the model is not wrapped in a process group.
        TrainingStopped: If the loss or the weights are not finite, or the run cannot be written.
        RunError: If the run was made with other settings or another model.

    Example:
        >>> data = excite.data.load("digits", classes=(8, 9))
        >>> model = build("small-cnn")
        >>> pe = excite.PersistentExcitation(model, radius=0.02)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        >>> result = fit(model, data, pe.loss, optimizer, epochs=1, batch=50, excitation=pe)
        >>> result.test_accuracy
    """
    settings = TrainerSettings(
        epochs, batch, seed, run, excitation, watch, checkpoint_every, predict, progress, capture
    )
    return _train(make_trainer(model, data, loss, optimizer, settings), seed)


def _train(trainer: Trainer, seed: int) -> TrainingResult:
    """Trains with a random state of its own; a failure is recorded in the run."""
    with trainer.record_failure(), own_randomness(seed, trainer.device):
        trainer.begin()
        result = trainer.train()
    trainer.raise_interrupt()
    return result


def make_trainer(
    model: nn.Module, data: TrainingData, loss: Loss, optimizer: torch.optim.Optimizer, settings: TrainerSettings
) -> Trainer:
    """Builds the trainer of this process; in a process group, a `DataParallelTrainer`."""
    from excite.train.distributed.data_parallel import DataParallelTrainer
    from excite.train.distributed.processes import these_processes

    processes = these_processes()
    if processes.size == 1:
        return Trainer(model, data, loss, optimizer, settings)
    return DataParallelTrainer(model, data, loss, optimizer, settings, processes)
