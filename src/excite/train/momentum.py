"""Momentum as Algorithm 1 of *Persistency of Excitation* has it: the buffer starts at zero, so the first step is damped, too."""

from __future__ import annotations

import torch

from excite.errors import InputError


def zero_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Starts the momentum buffers of `torch.optim.SGD` at zero; call it once, before the first step.

    Algorithm 1 has Δθ ← 0, then at every step Δθ ← γ Δθ + (1 − γ) ∇θ and θ ← θ − η Δθ. That is SGD with momentum γ and
    dampening γ, but for the first step: PyTorch sets the buffer to the first gradient without damping it, so that this gradient
    counts 1 / (1 − γ) times as much as every other (ten times for γ = 0.9). With a buffer of zeros PyTorch's rule is the
    algorithm's at every step.

    Args:
        optimizer: An SGD with momentum that has not made a step.

    Raises:
        InputError: If the optimizer is no SGD with momentum, or has made a step.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.9)
        >>> zero_momentum(optimizer)
    """
    if not isinstance(optimizer, torch.optim.SGD) or any(not group["momentum"] for group in optimizer.param_groups):
        raise InputError(f"optimizer: expected torch.optim.SGD with momentum > 0; got {type(optimizer).__name__}")
    if any(optimizer.state.values()):
        raise InputError("optimizer: expected one that has not made a step; momentum starts at zero before the first")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
