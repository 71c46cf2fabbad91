"""Every law that a group claims is a symmetry of the function and an identity of its gradients, in float64."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from excite.wiring import Group, trace
from models import CASES, build

from .zoo import ZOO, zoo

ALL = [*(("table", name) for name in CASES), *(("zoo", name) for name in ZOO)]


@functools.cache
def load(where: str, name: str) -> tuple[nn.Module, Tensor, tuple[Group, ...]]:
    model, x = build(name) if where == "table" else zoo(name)
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-13  # the norm law is exact for eps = 0
    pick = CASES[name].pick if where == "table" else 0 if name == "hidden-returned" else None
    return model, x, trace(model, x, output=pick).groups


def outputs(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    torch.manual_seed(0)  # the same dropout masks
    return [leaf for leaf in tree_leaves(functional_call(model, parameters, (x,))) if isinstance(leaf, Tensor)]


def moved(group: Group, parameters: dict[str, Tensor], matrix: Tensor) -> dict[str, Tensor]:
    """Producers times `matrix` from the left, consumers times its inverse transposed."""
    parameters = dict(parameters)
    for sites, by in ((group.producers, matrix), (group.consumers, torch.linalg.inv(matrix).T)):
        for site in sites:
            value = parameters[site.parameter]
            for _ in range(site.times):
                value = site.put(value, by @ site.rows(value))
            parameters[site.parameter] = value
    return parameters


def check_symmetry(model: nn.Module, x: Tensor, groups: tuple[Group, ...]) -> None:
    """The outputs do not change when channels are rescaled, or mixed where the law is "matrix"."""
    before = {k: v.detach().clone() for k, v in model.named_parameters()}
    clean = outputs(model, before, x)
    generator = torch.Generator().manual_seed(2)
    for group in groups:
        if group.law == "none":
            assert group.why
            continue
        n = group.channels
        matrices = [torch.diag(torch.rand(n, generator=generator, dtype=torch.float64) + 0.5)]
        if group.law == "matrix":
            matrices.append(torch.randn(n, n, generator=generator, dtype=torch.float64) / 3 + torch.eye(n))
        for matrix in matrices:
            after = moved(group, before, matrix)
            assert any(not torch.equal(after[k], before[k]) for k in before)
            for a, b in zip(clean, outputs(model, after, x)):
                torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9, msg=lambda m, g=group: f"{g}\n{m}")


def check_gradients(model: nn.Module, x: Tensor, groups: tuple[Group, ...]) -> None:
    """Σ G R' over producers is the transpose of Σ G R' over consumers, with G the rows of the gradient; else only its
    diagonal. Gradient flow changes Σ R R' by −(Σ G R' + its transpose), so their difference is conserved."""
    parameters = {k: v.detach().clone().requires_grad_() for k, v in model.named_parameters()}
    out = outputs(model, parameters, x)
    loss = sum((o * (1 + torch.arange(o.numel(), dtype=o.dtype).view(o.shape)).cos()).sin().sum() for o in out)
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    grads = {k: torch.zeros_like(p) if g is None else g for (k, p), g in zip(parameters.items(), found)}
    for group in groups:
        if group.law == "none":
            continue
        sums = []
        for sites in (group.producers, group.consumers):
            total = torch.zeros(group.channels, group.channels, dtype=torch.float64)
            for site in sites:
                total = (
                    total
                    + site.times * site.rows(grads[site.parameter]) @ site.rows(parameters[site.parameter].detach()).T
                )
            sums.append(total)
        made, read = sums[0], sums[1].T
        if group.law != "matrix":
            made, read = made.diagonal(), read.diagonal()
        torch.testing.assert_close(made, read, rtol=1e-7, atol=1e-9, msg=lambda m, g=group: f"{g}\n{m}")


@pytest.mark.parametrize(("where", "name"), ALL)
def test_every_claimed_law_leaves_the_function_unchanged(where: str, name: str) -> None:
    check_symmetry(*load(where, name))


@pytest.mark.slow
@pytest.mark.parametrize(("where", "name"), ALL)
def test_gradients_of_producers_and_consumers_balance(where: str, name: str) -> None:
    check_gradients(*load(where, name))


@pytest.mark.parametrize("name", ["mlp", "resnet-identity", "shared", "deep-linear", "transformer"])
def test_gradient_descent_conserves_up_to_the_square_of_its_step(name: str) -> None:
    """Appendix F: one step with rate η changes the conserved number by η² (‖G‖² of producers − of consumers)."""
    model, x, groups = load("table", name)
    parameters = dict(model.named_parameters())
    torch.manual_seed(0)
    model(x).square().sum().backward()
    rate = 0.05
    for group in (g for g in groups if g.law in ("matrix", "channel")):
        drift, slack = (torch.zeros(group.channels, dtype=torch.float64) for _ in range(2))
        for sites, sign in ((group.producers, 1), (group.consumers, -1)):
            for site in sites:
                p = parameters[site.parameter]
                before, grad = site.rows(p.detach()), site.rows(p.grad)  # type: ignore[arg-type]
                drift += sign * ((before - rate * grad).square() - before.square()).sum(1)
                slack += sign * rate**2 * grad.square().sum(1)
        torch.testing.assert_close(drift, slack, rtol=1e-7, atol=1e-12)
