"""How a model was trained, as far as the theorems ask."""

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
from excite.excitation.targets import choose_target
from excite.train.config import TrainConfig

Loss = Literal["squared", "cross-entropy"]
AuditLoss = Literal["squared", "mse", "cross-entropy"]


@dataclass(frozen=True)
class Setting:
    """`loss` is a mean over points: ‖f − target‖² or the cross-entropy, with decay/2 ‖θ‖² added; None if not known.

    `descent` is None where the optimizer has no step that a theorem speaks about, and `why` says so. `asked` are the
    conditions that the theorems put on the training itself. `start` makes the model with its initial weights. With
    `averaged` the squared error is a mean over points and outputs, ‖f − target‖²/m, as in `F.mse_loss`.
    """

    loss: Loss | None = None
    descent: Descent | None = None
    why: str = "how the model was trained is not known"
    decay: float = 0.0
    asked: tuple[Assumption, ...] = ()
    start: Callable[[], nn.Module] | None = None
    averaged: bool = False


def setting_of(config: TrainConfig, points: int) -> Setting:
    """What the config of a run says about training on `points` points."""
    optimizer = config.optimizer
    descent, why = None, ""
    if optimizer.name != "sgd":
        why = f"{optimizer.name} scales the step of every weight by itself: there is no one step size"
    elif config.schedule != "constant":
        why = f"the step size moves ({config.schedule}): there is no one step size"
    else:
        try:
            descent = Descent(optimizer.lr, optimizer.momentum, optimizer.dampening, optimizer.nesterov)
        except InputError as error:
            why = str(error)
    words = [] if descent is None else [f"step size {descent.step:g}"]
    if descent is not None and descent.momentum:
        words.append(f"momentum {descent.momentum:g}" + (" of Nesterov's kind" if descent.nesterov else ""))
        words += [f"dampening {descent.dampening:g}"] if descent.dampening else []
    changed = [name for name in ("excitation", "adversarial", "augment") if getattr(config, name) is not None]
    size = min(config.batch, points)
    asked = (
        Assumption(
            "steps are those of gradient descent, with one step size", descent is not None, why or ", ".join(words)
        ),
        Assumption("every step sees all training points", size == points, f"{size} of {points} a step"),
        Assumption("steps go down the plain loss", not changed, f"changed by {', '.join(changed)}" if changed else ""),
        Assumption(
            "weights do not decay",
            optimizer.weight_decay == 0,
            f"weight decay {optimizer.weight_decay:g}" if optimizer.weight_decay else "",
        ),
    )
    return Setting(config.loss, descent, why, optimizer.weight_decay, asked)


def targets(output: Tensor, y: Tensor, classes: int) -> Tensor:
    """What the squared error compares the outputs with, (N,) or (N, m): the targets themselves, 0 and 1, or codes."""
    if not classes:
        if y.numel() != output.numel():
            raise InputError(f"targets: expected shape {tuple(output.shape)}, one per output; got {tuple(y.shape)}")
        y = y.reshape(len(y), -1)
        return y[:, 0] if y.shape[1] == 1 else y
    if output.dim() < 2 or output.shape[1] == 1:
        return y.reshape(-1)
    return codes(classes, output.shape[1])[y.cpu()].to(output)


def mean_loss(model: nn.Module, x: Tensor, y: Tensor, classes: int, setting: Setting) -> Tensor:
    """The mean over points that training went down, without anything that perturbs them; decay/2 ‖θ‖² is added."""
    output = pick_output(model(x))
    if classes and output.dim() > 2:
        if y.shape != output.shape[:-1]:
            raise InputError(
                f"labels: expected shape {tuple(output.shape[:-1])}, one per decision; got {tuple(y.shape)}"
            )
        output, y = output.flatten(0, -2), y.flatten()  # a label for every token: the mean is over tokens
    one = output.dim() < 2 or output.shape[1] == 1
    if setting.loss == "cross-entropy" and not classes:
        raise InputError(f"cross-entropy: expected labels as whole numbers; got {y.dtype}: use y.long()")
    if classes:
        target = choose_target(None if one else classes, None, setting.loss or "squared")
        loss = target.errors(output.reshape(-1) if one else output, target.labels(y, len(output))).mean()
    else:
        error = output.reshape(len(output), -1) - targets(output, y, 0).reshape(len(y), -1).to(output)
        loss = error.square().sum(1).mean()
    if setting.averaged:
        loss = loss / output[0].numel()
    if setting.decay:
        loss = loss + setting.decay / 2 * torch.stack([p.square().sum() for p in model.parameters()]).sum()
    return loss
