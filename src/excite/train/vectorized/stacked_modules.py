"""Several networks of one architecture as one: their weights on a new first axis, their samples side by side.

A batch holds sample i of every network next to each other: (B·S, ...) with the network running fastest. Seen as
(B, S·C, ...), a convolution of all networks is one grouped convolution, and a linear map one batched product, without
moving a number; everything else works on samples, whichever network they belong to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from excite._core.preserve import RandomState
from excite.errors import ModelError

_DENSE = (
    256  # input channels of all networks together up to which zeros between networks cost less than many small kernels
)
_CONVOLUTIONS: dict[Callable[..., Any], int] = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}


class StackedLayers(TorchFunctionMode):
    """While active, linear maps and convolutions whose weights have one axis too many are those of a stack."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            arguments = {**dict(zip(("input", "weight", "bias"), args)), **kwargs}
            if arguments["weight"].dim() == 3:
                return _linear(**arguments)
        elif func in _CONVOLUTIONS:
            names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
            arguments = {**dict(zip(names, args)), **kwargs}
            if arguments["weight"].dim() == _CONVOLUTIONS[func] + 3:
                return _convolution(func, **arguments)
        return func(*args, **kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input (n·S, ..., i), weight (S, o, i), bias (S, o) -> (n·S, ..., o)."""
    stack = weight.shape[0]
    apart: Tensor = input.unflatten(0, (-1, stack)).transpose(0, 1)  # (S, n, ..., i)
    rows, turned = apart.flatten(1, -2), weight.transpose(1, 2)
    out = torch.bmm(rows, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, turned)
    back: Tensor = out.unflatten(1, apart.shape[1:-1])
    return back.transpose(0, 1).flatten(0, 1)


def _convolution(
    function: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """input (n·S, c, ...), weight (S, o, c/groups, ...), bias (S, o) -> (n·S, o, ...), as one convolution.

    Grouped, or, where a GPU would take the groups one by one, dense with zeros between the networks.
    """
    stack = weight.shape[0]
    together = input.unflatten(0, (-1, stack)).flatten(1, 2)  # (n, S·c, ...)
    flat = None if bias is None else bias.flatten()
    if weight.is_cuda and groups == 1 and together.shape[1] <= _DENSE:
        out = function(together, side_by_side(weight), flat, stride, padding, dilation)
    else:
        out = function(together, weight.flatten(0, 1), flat, stride, padding, dilation, stack * groups)
    back: Tensor = out.unflatten(1, (stack, -1))
    return back.flatten(0, 1)


def side_by_side(weight: Tensor) -> Tensor:
    """(S, o, c, ...) -> (S·o, S·c, ...), each network's weights on the diagonal and zeros elsewhere."""
    return torch.diag_embed(weight.movedim(0, -1), dim1=0, dim2=2).flatten(2, 3).flatten(0, 1)


def stack_batches(batches: Sequence[Tensor]) -> Tensor:
    """One batch of S·B samples from S batches of B, in the order that stacked networks expect."""
    return torch.stack(list(batches), 1).flatten(0, 1)


def stack_models(models: Sequence[nn.Module]) -> nn.Module:
    """One module with the parameters of all models, (S, ...); theirs become views of it, so that they move with it.

    Run it under `StackedLayers`. Refused where a network cannot be stacked; the models are left as they were.
    """
    first = models[0]
    if next(first.buffers(), None) is not None:
        raise ModelError("networks with buffers (running statistics) cannot be trained together")
    if any(type(a) is not type(b) for model in models for a, b in zip(first.modules(), model.modules(), strict=True)):
        raise ModelError("networks that are trained together must have the same architecture")
    stacked = copy.deepcopy(first)
    owners = _owners(stacked)
    for name, parameter in first.named_parameters():
        values = torch.stack([model.get_parameter(name).detach() for model in models])
        together = nn.Parameter(values, requires_grad=parameter.requires_grad)
        for module, key in owners[name]:
            setattr(module, key, together)
    for name, together in stacked.named_parameters():
        for i, model in enumerate(models):
            model.get_parameter(name).data = together.data[i]
    return stacked


def _owners(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """For each parameter, all places where it stands (more than one for tied weights)."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners[names[id(parameter)]].append((module, key))
    return owners


def check_stack(stacked: nn.Module, models: Sequence[nn.Module], x: Tensor) -> None:
    """Refuse a stack that does not compute what its networks compute on x (B, ...), or that draws random numbers."""
    random = RandomState(x.device)
    try:
        with torch.no_grad():
            with StackedLayers():
                out = stacked(stack_batches([x] * len(models)))
            drew = random.moved()
            single = stack_batches([model(x) for model in models])
    except (RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"the networks cannot be trained together: {' '.join(str(error).split())[:160]}") from error
    finally:
        random.restore()
    if drew:
        raise ModelError("networks that draw random numbers (dropout) cannot be trained together")
    scale = float(single.nan_to_num().abs().max())
    if out.shape != single.shape or not torch.allclose(out, single, rtol=1e-3, atol=1e-3 * scale, equal_nan=True):
        raise ModelError(
            "the networks compute something else together than one by one: samples are not on the first axis"
        )
