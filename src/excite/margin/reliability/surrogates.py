"""Gradients for models whose own mislead: of the last linear layer, straight through rounding, averaged, or from differences.

They only steer the search: what counts as adversarial is decided by the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from excite._core.checks import Norm
from excite.margin.problem import (
    AdversarialPerturbations,
    Decision,
    MarginProblem,
    column,
    features,
    no_perturbations,
)
from excite.margin.reliability.planted import last_linear
from excite.margin.search import PLANS, CleanPoints, Noise, search

Method = Literal["logits", "straight-through", "averaged", "differences"]
METHODS: tuple[Method, ...] = ("logits", "straight-through", "averaged", "differences")
DESCRIPTIONS: dict[Method, str] = {
    "logits": "gradients of the last linear layer instead of what follows it",
    "straight-through": "gradients straight through rounding, signs and other steps",
    "averaged": "gradients averaged over noise",
    "differences": "differences of outputs instead of gradients",
}
DRAWS = 8  # passes whose mean stands for a model that is not deterministic
_AVERAGED, _PAIRS = 8, 32
_NOISE = 0.3  # size of the noise relative to the best radius


class StraightThrough(TorchFunctionMode):
    """Rounding, signs and the like have the gradient of the identity while this mode is on."""

    _STEPS: frozenset[Any] = frozenset(
        function
        for name in ("round", "floor", "ceil", "trunc", "fix", "sign", "sgn")
        for function in (getattr(torch, name), getattr(Tensor, name))
    )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._STEPS and isinstance(args[0], Tensor) and args[0].requires_grad:
            return args[0] + (result - args[0]).detach()
        return result


@dataclass(frozen=True, kw_only=True)
class SurrogateDecision(Decision):
    """The decisions of another `Decision`, with gradients by `method`; noise is measured by `size` (N,), per coordinate.

    layer: the last linear layer, for "logits"; it has one output per class.
    """

    base: Decision
    method: Method
    noise: Noise
    size: Tensor
    layer: nn.Linear | None = None

    def rows(self, index: Tensor) -> SurrogateDecision:
        """The same for some of the points."""
        fewer = super().rows(index)
        assert isinstance(fewer, SurrogateDecision)
        return replace(fewer, base=self.base.rows(index), size=self.size[index])

    def outputs(self, z: Tensor) -> Tensor:
        """The outputs of the model itself."""
        return self.base.outputs(z)

    def gradients(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logit margin and adversarial (N,) of the model itself, and the surrogate of the gradient."""
        logit_margin, adversarial = self.base.evaluate(z)
        if self.layer is not None:
            logit_margin, gradient = self._before_what_follows(z, self.layer)
        elif self.method == "straight-through":
            with StraightThrough():
                gradient = self.base.gradients(z)[2]
        elif self.method == "averaged":
            gradient = torch.zeros_like(z)
            for _ in range(_AVERAGED):
                gradient += self.base.gradients(z + column(self.size, z) * self.noise(z.shape, z))[2]
        else:
            gradient = torch.zeros_like(z)
            for _ in range(_PAIRS):
                step = self.noise(z.shape, z)
                ahead, back = (self.base.evaluate(z + sign * column(self.size, z) * step)[0] for sign in (1, -1))
                gradient += column((ahead - back) / (2 * self.size), z) * step / _PAIRS
        return logit_margin, adversarial, gradient

    def _before_what_follows(self, z: Tensor, layer: nn.Linear) -> tuple[Tensor, Tensor]:
        """Logit margin (N,) of the outputs of the layer, and its gradient."""
        z = z.detach().requires_grad_()
        f = layer(features(self.base.model, layer, z, self.base.output).to(layer.weight.dtype))
        logit_margin = self.base.logit_margin(f[:, 0] if self.base.classes == 1 else f)
        if not logit_margin.requires_grad:
            return logit_margin.to(z.dtype), torch.zeros_like(z)
        (gradient,) = torch.autograd.grad(logit_margin.sum(), z)
        return logit_margin.detach().to(z.dtype), torch.nan_to_num(gradient, 0.0, 0.0, 0.0)


def noise_size(radius: Tensor, norm: Norm, elements: int) -> Tensor:
    """(N,): standard deviation per coordinate of noise that is `_NOISE` of the radius long, about, in the norm."""
    lengths: dict[Norm, float] = {
        "inf": 1.0,
        "2": elements**0.5,
        "1": 0.8 * elements,
    }  # a standard normal has mean size 0.8
    size: Tensor = radius * (_NOISE / lengths[norm])
    return size


def surrogate_search(
    problem: MarginProblem, radius: Tensor, method: Method, steps: int, noise: Noise
) -> AdversarialPerturbations:
    """A search from the clean points with surrogate gradients; noise is sized by the best radii so far (N,).

    Finds nothing where the method does not apply: "logits" without a last linear layer.
    """
    layer = last_linear(problem.decision.model, problem.x[:2]) if method == "logits" else None
    if method == "logits" and (layer is None or layer.out_features != problem.decision.classes):
        return no_perturbations(problem.x)
    size = noise_size(radius, problem.constraint.norm, problem.x[0].numel())
    base = problem.decision
    decision = SurrogateDecision(
        base.model, base.output, base.threshold, base.labels, base.classes, base.scale,
        base=base, method=method, noise=noise, size=size, layer=layer,
    )  # fmt: skip
    problem = replace(problem, decision=decision)
    clean = CleanPoints(*decision.gradients(problem.x), torch.minimum(problem.constraint.init_radius, radius))
    return search(problem, PLANS[problem.constraint.norm][1], steps, clean, noise)


class MeanOutputs(nn.Module):
    """A model that is not deterministic as the mean of `DRAWS` of its outputs."""

    def __init__(self, model: nn.Module, pick: Callable[[Any], Tensor]):
        super().__init__()
        self.model, self.pick = model, pick

    def forward(self, x: Tensor) -> Tensor:
        """The mean output."""
        return torch.stack([self.pick(self.model(x)) for _ in range(DRAWS)]).mean(0)


def is_random(model: nn.Module, pick: Callable[[Any], Tensor], x: Tensor) -> bool:
    """Whether two passes of the same points differ by more than the rounding of kernels that add in changing order."""
    with torch.no_grad():
        first, second = (pick(model(x)) for _ in range(2))
    if first.shape != second.shape or not first.is_floating_point() or not bool(torch.isfinite(first).all()):
        return False  # refused elsewhere
    scale = first.abs().amax() if first.numel() else torch.tensor(0.0)
    return bool(((first - second).abs() > 1e3 * torch.finfo(first.dtype).eps * scale).any())
