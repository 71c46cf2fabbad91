"""Train several networks of one architecture in one vectorised step: seeds of a study for little more than one of them.

Each network keeps its own data, order of points, run folder and checkpoints, the same as if it had been trained alone;
only the arithmetic is shared. Weights and optimizer state of each are views of those of the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from excite.errors import InputError, ModelError
from excite.train.loop import run_loop
from excite.train.settings import TrainingResult
from excite.train.trainer import Trainer
from excite.train.vectorized.stacked_modules import StackedLayers, check_stack, stack_batches, stack_models

Losses = Callable[[Tensor, Tensor], Tensor]  # (x, y) -> one loss per sample


def fit_together(trainers: Sequence[Trainer], losses: Callable[[nn.Module], Losses]) -> list[TrainingResult]:
    """Trains several networks of one architecture in one vectorized step; each ends as if it had been trained alone.

    Args:
        trainers: Trainers that have begun, are at the same step, and differ only in weights, data and seed.
        losses: Builds the loss per sample of the stacked model.

    Returns:
        The result of each trainer.

    Raises:
        InputError: If the trainers differ in their number of points or steps.
        ModelError: If the networks cannot be stacked; nothing has been trained then.
        TrainingStopped: If a network cannot continue; its trainer has `failure` set.
    """
    first, count = trainers[0], len(trainers)
    if len({(t.epoch, t.position, t.epochs, t.per_epoch, len(t.x), t.device) for t in trainers}) != 1:
        raise InputError("networks that are trained together must have as many points and steps, and be equally far")
    stacked = stack_models([t.model for t in trainers])
    check_stack(stacked, [t.model for t in trainers], first.x[:4])
    optimizer = stack_optimizers(stacked, [t.optimizer for t in trainers])
    per_sample = losses(stacked)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with StackedLayers():
            return per_sample(x, y).reshape(-1, count).mean(0)

    def check(values: Tensor) -> None:
        for trainer, value in zip(trainers, values.unbind()):
            trainer.before_update(value)

    step = first.make_step(loss, optimizer, count)
    step.check = check
    shared = False

    def update(batches: Sequence[Tensor]) -> tuple[Tensor, ...]:
        nonlocal shared
        x = stack_batches([t.x[indices] for t, indices in zip(trainers, batches)])
        y = stack_batches([t.y[indices] for t, indices in zip(trainers, batches)])
        values = step(x, y)
        if not shared:  # the first step made the optimizer's state
            share_state(stacked, optimizer, [t.optimizer for t in trainers])
            shared = True
        return values.unbind()

    return run_loop(trainers, update, step)


def stack_optimizers(stacked: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """One optimizer for the stack, with the state that those of its networks have.

    Optimizers that treat each number by itself (SGD, Adam) do with the stack what they do with each network.
    """
    first = optimizers[0]
    if any(len(o.param_groups) != 1 or o.defaults != first.defaults or type(o) is not type(first) for o in optimizers):
        raise ModelError(
            "networks that are trained together need optimizers with the same settings and one parameter group"
        )
    if not isinstance(first, torch.optim.SGD | torch.optim.Adam | torch.optim.AdamW):
        raise ModelError(f"{type(first).__name__} is not known to treat each weight by itself: train one by one")
    trained = [p for p in stacked.parameters() if p.requires_grad]
    together = type(first)(trained, **first.defaults)
    for at, parameter in enumerate(trained):
        states = [o.state.get(o.param_groups[0]["params"][at]) for o in optimizers]
        if all(states):
            together.state[parameter] = {
                key: torch.stack([s[key] for s in states]) if _per_weight(value, parameter[0]) else value  # type: ignore[index]
                for key, value in states[0].items()  # type: ignore[union-attr]
            }
    return together


def share_state(
    stacked: nn.Module, together: torch.optim.Optimizer, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Make the state of each optimizer a view of the stack's, for checkpoints."""
    for at, parameter in enumerate(p for p in stacked.parameters() if p.requires_grad):
        for i, optimizer in enumerate(optimizers):
            optimizer.state[optimizer.param_groups[0]["params"][at]] = {
                key: value[i] if _per_weight(value, parameter) else value
                for key, value in together.state[parameter].items()
            }


def _per_weight(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape
