"""Algorithm 1 as it is printed: one point, one search at a time, perturbations added by module hooks."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def steepest(gradient: Tensor, norm: str) -> Tensor:
    if norm == "inf":
        return gradient.sign()
    if norm == "2":
        return gradient / gradient.norm() if gradient.norm() > 0 else gradient
    unit = torch.zeros_like(gradient)
    index = int(gradient.abs().argmax())
    unit.view(-1)[index] = gradient.reshape(-1)[index].sign()
    return unit


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]


def forward(model: nn.Module, layers: list[nn.Module], x: Tensor, d: list[Tensor | None]) -> Tensor:
    """f(x; d): d_k is added to the input of layers[k]; None stands for zero, to be created."""
    handles = []
    for k, layer in enumerate(layers):

        def hook(module: nn.Module, args: tuple[Tensor], k: int = k) -> tuple[Tensor]:
            if d[k] is None:
                d[k] = torch.zeros_like(args[0], requires_grad=True)
            return (args[0] + d[k],)

        handles.append(layer.register_forward_pre_hook(hook))
    try:
        return model(x).squeeze()
    finally:
        for handle in handles:
            handle.remove()


def extreme(
    model: nn.Module, x: Tensor, radius: float, norm: str, steps: int, sign: int, v: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The output at the last iterate of `steps` steepest steps up (sign 1) or down (sign −1), for x of one sample.

    Of several outputs, the extreme is that of v'f.
    """
    layers = layers_of(model)
    d: list[Tensor | None] = [None] * len(layers)
    for _ in range(steps):
        output = forward(model, layers, x, d)
        gradients = torch.autograd.grad(output if v is None else output @ v, d)
        d = [(p + sign * radius / steps * steepest(g, norm)).detach().requires_grad_() for p, g in zip(d, gradients)]
    return forward(model, layers, x, d), d


def direction(model: nn.Module, x: Tensor, radius: float, norm: str, turns: int, start: Tensor) -> Tensor:
    """v after `turns` times: the steepest d for J'v, then the unit vector along f(x; d) − f(x); x of one sample."""
    layers, v = layers_of(model), start
    for _ in range(turns):
        d: list[Tensor | None] = [None] * len(layers)
        clean = forward(model, layers, x, d)
        gradients = torch.autograd.grad(clean @ v, d)
        moved = forward(model, layers, x, [radius * steepest(g, norm) for g in gradients])
        v = ((moved - clean) / (moved - clean).norm()).detach()
    return v


def longest_column(model: nn.Module, x: Tensor, radius: float) -> Tensor:
    """Along the longest column of the Jacobian with respect to the perturbations of one layer; x of one sample."""
    layers = layers_of(model)
    d: list[Tensor | None] = [None] * len(layers)
    output = forward(model, layers, x, d)
    rows = [torch.autograd.grad(output[c], d, retain_graph=True) for c in range(len(output))]
    jacobians = [torch.stack([row[k].flatten() for row in rows]) for k in range(len(layers))]  # (outputs, entries)
    _, k, i = max((float(j[:, i].norm()), k, i) for k, j in enumerate(jacobians) for i in range(j.shape[1]))
    step = [torch.zeros_like(p) for p in d]  # type: ignore[arg-type]
    step[k].view(-1)[i] = radius
    moved = forward(model, layers, x, list(step)) - output
    return (moved / moved.norm()).detach()


def reach(model: nn.Module, x: Tensor, norm: str, v: Tensor) -> float:
    """Σ_k ‖J_k'v‖ in the dual norm; x of one sample."""
    layers = layers_of(model)
    d: list[Tensor | None] = [None] * len(layers)
    gradients = torch.autograd.grad(forward(model, layers, x, d) @ v, d)
    return sum(float(g.flatten().norm(p={"inf": 1, "2": 2, "1": torch.inf}[norm])) for g in gradients)


def two_nearest(output: Tensor, codes: Tensor) -> Tensor:
    """From the second nearest code to the nearest, for one output."""
    order = (output - codes).norm(dim=1).argsort()
    return codes[order[0]] - codes[order[1]]


class Multiply(nn.Module):
    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def fixed(model: nn.Module, x: Tensor) -> list[nn.Module]:
    """For each sample, the model as a fixed function: the dropout masks and batch statistics of a forward of `x`."""
    masks: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):

            def drop(module: nn.Module, args: tuple[Tensor], name: str = name) -> None:
                state = torch.get_rng_state()
                masks[name] = nn.functional.dropout(torch.ones_like(args[0]), module.p)
                torch.set_rng_state(state)

            handles.append(module.register_forward_pre_hook(drop))
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            handles.append(
                module.register_forward_pre_hook(lambda m, args, name=name: inputs.__setitem__(name, args[0].detach()))
            )
    model(x)
    for handle in handles:
        handle.remove()
    copies = []
    for i in range(len(x)):
        twin = copy.deepcopy(model)
        for name, mask in masks.items():
            twin.set_submodule(name, Multiply(mask[i : i + 1]))
        for name, signal in inputs.items():
            norm = twin.get_submodule(name)
            dims = [k for k in range(signal.dim()) if k != 1]
            norm.running_var, norm.running_mean = torch.var_mean(signal, dims, correction=0)
            norm.eval()
        copies.append(twin)
    return copies
