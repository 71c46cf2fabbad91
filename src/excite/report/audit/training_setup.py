"""How a model was trained: loss, step size and the conditions of the theorems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from excite._core.calls import pick_output
from excite.bounds import Assumption, Descent
from excite.errors import InputError
from excite.excitation.codes import codes
from excite.excitation.targets.choose import choose_target
from excite.train.config import TrainConfig

Loss = Literal["squared", "cross-entropy"]
AuditLoss = Literal["squared", "mse", "cross-entropy"]


@dataclass(frozen=True)
class TrainingSetup:
    """How a model was trained, as far as the theorems depend on it.

    Attributes:
        loss: Mean over points of ‖f − target‖² or of the cross-entropy, plus decay/2 ‖θ‖²; None if unknown.
        descent: Step size and momentum, or None where the optimizer has no single step size.
        why: Why the loss or the step size is unknown.
        decay: Weight decay.
        conditions: Conditions of the theorems on the training itself.
        start: Builds the model with its initial weights.
        averaged: The squared error is a mean over points and outputs, ‖f − target‖²/m, as in `F.mse_loss`.
    """

    loss: Loss | None = None
    descent: Descent | None = None
    why: str = "how the model was trained is not known"
    decay: float = 0.0
    conditions: tuple[Assumption, ...] = ()
    start: Callable[[], nn.Module] | None = None
    averaged: bool = False


def training_setup(config: TrainConfig, points: int) -> TrainingSetup:
    """The setup that the config of a run describes, for `points` training points."""
    optimizer = config.optimizer
    descent, why = None, ""
    if optimizer.name != "sgd":
        why = f"{optimizer.name} scales the step of each weight: there is no single step size"
    elif config.schedule != "constant":
        why = f"the step size changes ({config.schedule}): there is no single step size"
    else:
        try:
            descent = Descent(optimizer.lr, optimizer.momentum, optimizer.dampening, optimizer.nesterov)
        except InputError as error:
            why = str(error)
    details = [] if descent is None else [f"step size {descent.step:g}"]
    if descent is not None and descent.momentum:
        details.append(f"{'Nesterov ' if descent.nesterov else ''}momentum {descent.momentum:g}")
        details += [f"dampening {descent.dampening:g}"] if descent.dampening else []
    changed = [name for name in ("excitation", "adversarial", "augment") if getattr(config, name) is not None]
    size = min(config.batch, points)
    conditions = (
        Assumption(
            "the optimizer is gradient descent with a single step size", descent is not None, why or ", ".join(details)
        ),
        Assumption("every step uses all training points", size == points, f"{size} of {points} per step"),
        Assumption(
            "the training loss is the plain loss", not changed, f"changed by {', '.join(changed)}" if changed else ""
        ),
        Assumption(
            "no weight decay",
            optimizer.weight_decay == 0,
            f"weight decay {optimizer.weight_decay:g}" if optimizer.weight_decay else "",
        ),
    )
    return TrainingSetup(config.loss, descent, why, optimizer.weight_decay, conditions)


def targets(output: Tensor, y: Tensor, classes: int) -> Tensor:
    """Targets of the squared error, (N,) or (N, m): the targets themselves, 0 and 1, or codes of the classes."""
    if not classes:
        if y.numel() != output.numel():
            raise InputError(f"targets: expected shape {tuple(output.shape)}, one per output; got {tuple(y.shape)}")
        y = y.reshape(len(y), -1)
        return y[:, 0] if y.shape[1] == 1 else y
    if output.dim() < 2 or output.shape[1] == 1:
        return y.reshape(-1)
    return codes(classes, output.shape[1])[y.cpu()].to(output)


def mean_loss(model: nn.Module, x: Tensor, y: Tensor, classes: int, setup: TrainingSetup) -> Tensor:
    """The training loss without perturbations: a mean over points, plus decay/2 ‖θ‖²."""
    output = pick_output(model(x))
    if classes and output.dim() > 2:
        if y.shape != output.shape[:-1]:
            raise InputError(
                f"labels: expected shape {tuple(output.shape[:-1])}, one per decision; got {tuple(y.shape)}"
            )
        output, y = output.flatten(0, -2), y.flatten()  # a label for every token: the mean is over tokens
    single = output.dim() < 2 or output.shape[1] == 1
    if setup.loss == "cross-entropy" and not classes:
        raise InputError(f"cross-entropy: expected integer labels; got {y.dtype}: use y.long()")
    if classes:
        target = choose_target(None if single else classes, None, setup.loss or "squared")
        loss = target.errors(output.reshape(-1) if single else output, target.labels(y, len(output))).mean()
    else:
        error = output.reshape(len(output), -1) - targets(output, y, 0).reshape(len(y), -1).to(output)
        loss = error.square().sum(1).mean()
    if setup.averaged:
        loss = loss / output[0].numel()
    if setup.decay:
        loss = loss + setup.decay / 2 * torch.stack([p.square().sum() for p in model.parameters()]).sum()
    return loss
