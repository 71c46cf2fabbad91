"""Adversarial weight perturbation (AWP; Wu, Xia and Wang, 2020): the loss at weights moved up the loss themselves.

    w_l + v_l,   v_l = γ · ‖w_l‖ · g_l / ‖g_l‖,   g_l = gradient of the batch's loss with respect to w_l

for each weight w_l with two or more dimensions. The gradient at w + v is taken as that of w, so the optimizer moves, and
decays, the weights themselves.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from excite._core.preserve import preserve_state
from excite._core.wrappers import is_sharded, is_shared, unwrap
from excite.errors import ModelError

_reported: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose recurrent layers were named in a warning


def perturbed_weights(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that AWP moves: floating-point ones with two or more dimensions that require gradients.

    Those of recurrent layers are left out, since the kernels of `nn.LSTM` and its like read a list of their own; a
    warning names them once.
    """
    inner = unwrap(model)
    if is_sharded(inner):
        raise ModelError("awp: the norm of a weight is not known where parameters are sharded (FSDP): leave awp out")
    recurrent = {
        f"{path}.{name}" if path else name: parameter
        for path, module in inner.named_modules()
        if isinstance(module, nn.RNNBase)
        for name, parameter in module.named_parameters(recurse=False)
    }
    if recurrent and inner not in _reported:
        _reported.add(inner)
        warnings.warn(
            f"awp: weights of recurrent layers are not perturbed: {', '.join(sorted(recurrent))}", stacklevel=4
        )
    left_out = {id(parameter) for parameter in recurrent.values()}
    return [
        parameter
        for parameter in inner.parameters()
        if parameter.requires_grad
        and parameter.dim() > 1
        and parameter.is_floating_point()
        and id(parameter) not in left_out
    ]


def weight_perturbations(model: nn.Module, gamma: float, loss: Callable[[], Tensor]) -> dict[nn.Parameter, Tensor]:
    """v_l for each weight.

    Args:
        model: The model, perhaps wrapped; left as it was.
        gamma: Size of the perturbation relative to the norm of each weight.
        loss: The batch's loss, a scalar, from a forward pass.

    Returns:
        The perturbations by parameter; parameters without an influence on the loss are left out.
    """
    weights = perturbed_weights(model)
    with preserve_state(unwrap(model)), torch.enable_grad():
        gradients: Sequence[Tensor | None] = torch.autograd.grad(loss(), weights, allow_unused=True)
    perturbations: dict[nn.Parameter, Tensor] = {}
    for weight, gradient in zip(weights, gradients):
        if gradient is None:
            continue
        if is_shared(model):
            dist.all_reduce(gradient)  # only its direction matters
        length = gradient.norm()
        unit = gradient / torch.where(length > 0, length, 1)
        perturbations[weight] = gamma * weight.detach().norm() * unit
    return perturbations


@contextmanager
def moved_weights(model: nn.Module, moves: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Runs the model with w + v in place of each parameter w, differentiable in w; parameters are back on exit."""
    moved = {id(weight): weight + move for weight, move in moves.items()}
    swapped = [
        (module, name, parameter)
        for module in unwrap(model).modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and id(parameter) in moved
    ]
    try:
        for module, name, parameter in swapped:
            module._parameters[name] = moved[id(parameter)]  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in swapped:
            module._parameters[name] = parameter
