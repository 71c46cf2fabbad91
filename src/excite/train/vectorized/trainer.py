"""Train several networks of one architecture in one vectorised step: seeds of a study for little more than one of them.

Each network keeps its own data, order of points, run folder and checkpoints, the same as if it had been trained alone;
only the arithmetic is shared. Weights and optimizer state of each are views of those of the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from excite.errors import InputError, ModelError, TrainingStopped
from excite.train.stopping import between_steps
from excite.train.trainer import Fitted, Training, stop_where_asked
from excite.train.vectorized.stacked_modules import Stacked, check_stack, stack_batches, stack_models

Losses = Callable[[Tensor, Tensor], Tensor]  # (x, y) -> one loss per sample


class OneStopped(TrainingStopped):
    """One of the networks cannot go on; the others can. `index` is its place."""

    def __init__(self, index: int, reason: TrainingStopped):
        super().__init__(str(reason))
        self.index = index


def fit_together(trainings: Sequence[Training], losses: Callable[[nn.Module], Losses]) -> list[Fitted]:
    """Take trainings that have begun through all their steps at once; each ends as if it had been alone.

    They must be equally far, and alike but for weights, data and seed. `losses(model)` makes the loss per sample of the
    stacked model. Where networks cannot be stacked this is refused with a ModelError before anything is trained.
    """
    first, count = trainings[0], len(trainings)
    if len({(t.epoch, t.position, t.epochs, t.per_epoch, len(t.x), t.device) for t in trainings}) != 1:
        raise InputError("networks that are trained together must have as many points and steps, and be equally far")
    stacked = stack_models([t.model for t in trainings])
    check_stack(stacked, [t.model for t in trainings], first.x[:4])
    optimizer = stack_optimizers(stacked, [t.optimizer for t in trainings])
    each = losses(stacked)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with Stacked():
            return each(x, y).reshape(-1, count).mean(0)

    step = first.make_step(loss, optimizer, count)
    step.check = lambda found: _for_each(trainings, Training.before_update, found.unbind())
    shared = False
    with between_steps():
        while first.epoch < first.epochs:
            for batches in zip(*(t.open_epoch() for t in trainings)):
                x = stack_batches([t.x[at] for t, at in zip(trainings, batches)])
                y = stack_batches([t.y[at] for t, at in zip(trainings, batches)])
                found = step(x, y)
                if not shared:  # the first step made the optimizer's state
                    share_state(stacked, optimizer, [t.optimizer for t in trainings])
                    shared = True
                _for_each(trainings, Training.after_update, found.unbind())
                stop_where_asked(trainings)
            _for_each(trainings, Training.close_epoch)
            stop_where_asked(trainings)
        return [t.finish(step.why_not, count) for t in trainings]


def stack_optimizers(stacked: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """One optimizer for the stack, with the state that those of its networks have.

    Optimizers that treat each number by itself (SGD, Adam) do with the stack what they do with each network.
    """
    first = optimizers[0]
    if any(len(o.param_groups) != 1 or o.defaults != first.defaults or type(o) is not type(first) for o in optimizers):
        raise ModelError("networks that are trained together need optimizers alike, with one group of parameters")
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


def _for_each(trainings: Sequence[Training], act: Callable[..., None], *values: Sequence[Tensor]) -> None:
    for i, each in enumerate(zip(trainings, *values)):
        try:
            act(*each)
        except TrainingStopped as error:
            raise OneStopped(i, error) from error
