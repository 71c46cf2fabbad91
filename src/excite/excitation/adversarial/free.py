"""Adversarial training for free (Shafahi et al., 2019): one backward pass for the perturbations and for the weights.

The steps are those of the ordinary search, but after each of them the optimizer updates the weights with the gradient of the pass
that the next step needs anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from excite.excitation.adversarial.ascent import Ascent
from excite.excitation.search import Perturbations


def free_passes(
    loss_at: Callable[[Perturbations | None], Tensor],
    worst: Perturbations | None,
    ascent: Ascent | None,
    updates: int,
    optimizer: torch.optim.Optimizer,
) -> Perturbations | None:
    """Updates of the weights, each followed by one step of the perturbations.

    Args:
        loss_at: The loss at some perturbations, differentiable in them and in the weights.
        worst: The perturbations after the first step of the search; None where nothing is perturbed.
        ascent: Takes the steps.
        updates: How many.
        optimizer: Updates the weights.

    Returns:
        The perturbations after the last step. No gradients are left in the optimizer's parameters.
    """
    for _ in range(updates):
        optimizer.zero_grad()
        if worst is None or ascent is None:
            loss_at(None).backward()
        else:
            leaves = {name: value.detach().requires_grad_() for name, value in worst.values.items()}
            loss_at(replace(worst, values=leaves)).backward()
            gradients = {name: leaf.grad for name, leaf in leaves.items()}
            values = {name: leaf.detach() for name, leaf in leaves.items()}
            worst = replace(worst, values=ascent.step(values, gradients))
        optimizer.step()
    if updates:
        optimizer.zero_grad()
    return worst
