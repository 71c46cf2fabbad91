"""How far the weights have moved since the start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.calls import Pick
from excite._core.checks import same_shapes
from excite._core.intercept.affine import clean_path
from excite.probes.base import Every, Probe, Schedule, StepContext, Values
from excite.probes.findings import Finding, MetricSeries, Panel, finite


def distance(parameters: Iterable[Tensor], initial: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """(‖θ − θ₀‖₂, ‖θ − θ₀‖₂ / ‖θ₀‖₂) over all entries, accumulated in float32 or better."""
    return _distance(*same_shapes(parameters, initial, "parameters"))


def _distance(parameters: Iterable[Tensor], initial: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    start = [one.detach() for one in initial]
    moved = _norms([p.detach() - one.to(p.device, p.dtype) for p, one in zip(parameters, start)]).norm()
    return moved, moved / _norms(start).to(moved.device).norm()


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """(count,) in float64."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    wide = [one if one.dtype in (torch.float32, torch.float64) else one.float() for one in tensors]
    norms = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in torch._foreach_norm(wide)]
    return torch.stack([one.double().to(norms[0].device) for one in norms])


class Distance(Probe):
    """`distance/absolute[/layer]` and `distance/relative[/layer]`: of all weights, and of each module that has some."""

    name = "distance"
    panel = Panel(
        "distances",
        "Distance to initialization",
        "How far the weights have moved from where they started.",
        (("relative", "‖θ − θ₀‖ / ‖θ₀‖"), ("absolute", "‖θ − θ₀‖")),
        order=40,
    )
    reduction = "first"  # every process holds the same weights

    def __init__(self, schedule: Schedule | None = None):
        super().__init__(Every(10) if schedule is None else schedule)
        self._initial: dict[str, Tensor] = {}
        self._paths: list[str] | None = None  # in the order of the columns of `_member`

    def attach(self, ctx: StepContext) -> None:
        if not self._initial:
            self._initial = {path: p.detach().clone() for path, p in _trained(ctx.model)}

    def measure(self, ctx: StepContext) -> Values:
        current = {path: p for path, p in _trained(ctx.model) if path in self._initial}
        if list(current) != self._paths:
            self._arrange(current)
        start = [self._initial[path] for path in current]
        moved = _norms([p.detach() - one.to(p.device, p.dtype) for p, one in zip(current.values(), start)])
        absolute = (self._member.to(moved.device) @ moved.square()).sqrt()
        values: dict[str, Tensor] = {}
        for (layer, size), length in zip(self._sizes.items(), absolute.unbind()):
            suffix = f"/{layer}" if layer else ""
            values[f"absolute{suffix}"] = length
            if size > 0:  # a layer that starts at zero has no relative distance
                values[f"relative{suffix}"] = length / size
        return values

    def _arrange(self, current: Mapping[str, Tensor]) -> None:
        """Which parameters make up which layer ("" is all of them), and how large the layers were at the start."""
        layers: dict[str, list[str]] = {"": list(current)}
        for path in current:
            layers.setdefault(path.rpartition(".")[0] or path, []).append(path)
        self._paths = list(current)
        self._member = torch.tensor([[path in mine for path in current] for mine in layers.values()]).double()
        norms = _norms([self._initial[path] for path in current])
        self._member = self._member.to(norms.device)
        self._sizes = dict(zip(layers, (self._member @ norms.square()).sqrt().tolist()))

    def state_dict(self) -> dict[str, Any]:
        return {"initial": self._initial}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._initial, self._paths = dict(state["initial"]), None

    @classmethod
    def default(cls, output: Pick = None) -> Distance:
        return cls(Every(50))

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        return _moved(history)


def _trained(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(clean_path(path), p) for path, p in model.named_parameters() if p.requires_grad]


def _moved(history: MetricSeries) -> list[Finding]:
    values = finite(history["distance/relative"])[1]
    if not len(values) or values[-1] <= 0:
        return []
    return [Finding("note", f"The weights have moved by {values[-1]:.0%} of their initial norm.")]
