"""Directions that the data never excite: a node that multiplies two inputs (section 5.2), and a bias that centring leaves (3.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from excite.bounds.excitation.hard_margin import Hyperplane, limit_hyperplane, margin_of, optimal_hyperplane
from excite.excitation import PersistentExcitation
from excite.studies.computed import Outcome
from excite.studies.excitation.small_systems.online_learners import Curve

Array = NDArray[np.float64]
RADIUS = 0.05


class ProductNode(nn.Module):
    """x (B, 5) ↦ w·(x₃, x₄, x₅) + c x₁x₂ + b. A first layer, the identity and not trained, takes perturbations too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False, dtype=torch.float64)
        self.last = nn.Linear(4, 1, dtype=torch.float64)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(5)).requires_grad_(False)
            self.last.weight.copy_(torch.tensor([[0.0, 0.0, 0.0, 1.0]]))
            self.last.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Applies the module."""
        z = self.first(x)
        out: Tensor = self.last(torch.cat([z[:, 2:], z[:, :1] * z[:, 1:2]], 1))
        return out


def multiplying_node(settings: Mapping[str, Any], seed: int) -> Outcome:
    """Regression on points with x₁ = x₂ = 0, which never excite c. `wrong` is what is left of c = 1 after training.

    `excited`: "nothing", "input" or "every layer", by the search of Algorithm 1, or "exactly": the input, at the true
    extremes f ± (ε‖w‖₁ + ε²|c|), which the search does not find, since x₁x₂ has no gradient at zero. `seen` is the
    largest output of the node in that training, over ε².
    """
    rng = np.random.default_rng([seed, 6])
    x = torch.from_numpy(np.column_stack([np.zeros((50, 2)), rng.normal(size=(50, 3))]))
    y = x[:, 2:] @ torch.from_numpy(rng.normal(size=3))
    model, how = ProductNode(), settings["excited"]
    layers = {"input": "input", "every layer": "all"}.get(how)
    pe = PersistentExcitation(model, RADIUS, layers=layers, steps=4) if layers else None
    trained = list(model.last.parameters())
    curve = Curve(settings["steps"])
    for step in range(settings["steps"]):
        curve.add(step, abs(float(model.last.weight[0, 3].detach())))
        gradients = torch.autograd.grad(_loss(model, pe, how, x, y), trained)
        with torch.no_grad():
            for parameter, gradient in zip(trained, gradients):
                parameter.sub_(0.1 * gradient)
    with torch.no_grad():
        left = abs(float(model.last.weight[0, 3]))
        error = float((model(x)[:, 0] - y).square().mean().sqrt())
    return Outcome({"wrong": left, "error": error, "seen": _reached_corner(pe, how, x)}, curve.plain(left))


def _loss(model: ProductNode, pe: PersistentExcitation | None, how: str, x: Tensor, y: Tensor) -> Tensor:
    """The mean over points of ½(f(x;d1) − y)² + ½(f(x;d2) − y)². Targets are numbers, not the labels of `pe.loss`."""
    if pe is not None:
        low, high = pe.extremes(x)
    else:
        weight = model.last.weight[0].abs()
        bound = RADIUS * weight[:3].sum() + RADIUS**2 * weight[3] if how == "exactly" else 0.0
        low, high = model(x)[:, 0] - bound, model(x)[:, 0] + bound
    loss: Tensor = ((high - y).square() + (low - y).square()).mean() / 2
    return loss


def _reached_corner(pe: PersistentExcitation | None, how: str, x: Tensor) -> float:
    if pe is None:
        return 1.0 if how == "exactly" else 0.0
    result = pe.perturbations(x)
    inputs = result.get("") or result["first"]
    product = [d[:, 0] * d[:, 1] for d in inputs]
    behind = [d[:, 3] for d in result["last"]] if "last" in result else [torch.zeros(())] * 2
    return max(float((a + b).abs().max()) for a, b in zip(product, behind)) / RADIUS**2


def centring(settings: Mapping[str, Any], seed: int) -> Outcome:
    """Two rings of points as in figure 2, and where gradient descent on the cross-entropy takes a linear classifier.

    `origin`: "elsewhere" (100 away from the mean, in a random direction), the "mean" of the points, or the "support": on
    the optimal hyperplane, which support vectors decide. `bias` is |B|, with the classes two apart along w as in
    Theorem 2; `margin` is that of the limit, as a fraction of the optimal one.
    """
    x, s = rings(seed)
    angle = np.random.default_rng([seed, 8]).uniform(0, 2 * np.pi)
    away = 100 * np.array([np.cos(angle), np.sin(angle)])
    best = optimal_hyperplane(x, s)
    middle = -best.bias * best.weight / (best.weight @ best.weight)
    origin = {"elsewhere": x.mean(0) + away, "mean": x.mean(0), "support": middle}[settings["origin"]]
    moved = x - origin
    limit = limit_hyperplane(moved, s)
    values = {
        "bias": abs(limit.bias) / (limit.margin * float(np.linalg.norm(limit.weight))),
        "margin": margin_of(limit.weight, limit.bias, moved, s) / best.margin,
    }
    flags = ("the hyperplanes are not solved",) if max(limit.gap, best.gap) > 1e-8 else ()
    lines = {"limit": _line(limit), "best": [*best.weight, best.bias + float(best.weight @ origin)]}
    return Outcome(values, {"points": moved.tolist(), "signs": s.tolist(), **lines}, flags)


def rings(seed: int) -> tuple[Array, Array]:
    """20 points per class, sizes and tilts drawn around those of figure 2, left; classes that a line separates."""
    rng = np.random.default_rng([seed, 7])
    t = 2 * np.pi * np.arange(20) / 20
    size, tilt = rng.uniform([50, 30], [60, 40]), rng.uniform([np.pi / 10, np.pi / 2.6], [np.pi / 7, np.pi / 2.1])
    up = 35 + size[1] * np.column_stack([np.cos(t), np.sin(t - tilt[1])])
    down = -35 + size[0] * np.column_stack([np.cos(t), np.sin(t - tilt[0])])
    return np.concatenate([up, down]), np.repeat([1.0, -1.0], 20)


def _line(plane: Hyperplane) -> list[float]:
    return [*map(float, plane.weight), plane.bias]
