"""How far the weights have moved since the start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from excite.probes.protocol import Every, Moment, Probe, Schedule, Values
from excite.wiring.affine import clean_path


def distance(parameters: Iterable[Tensor], initial: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """(‖θ − θ₀‖₂, ‖θ − θ₀‖₂ / ‖θ₀‖₂) over all entries, accumulated in float32 or better."""
    moved = start = torch.zeros(())
    for now, before in zip(parameters, initial):
        wide = torch.promote_types(now.dtype, torch.float32)
        now, before = now.detach().to(wide), before.to(now.device, wide)
        moved = moved.to(now) + (now - before).square().sum()
        start = start.to(now) + before.square().sum()
    return moved.sqrt(), (moved / start).sqrt()


class Distance(Probe):
    """`distance/absolute[/layer]` and `distance/relative[/layer]`: of all weights, and of each module that has some."""

    name = "distance"
    reduction = "first"  # every process holds the same weights

    def __init__(self, schedule: Schedule | None = None):
        super().__init__(schedule or Every(10))
        self._initial: dict[str, Tensor] = {}

    def attach(self, now: Moment) -> None:
        if not self._initial:
            self._initial = {path: p.detach().clone() for path, p in _trained(now.model)}

    def measure(self, now: Moment) -> Values:
        values: dict[str, Tensor] = {}
        layers: dict[str, list[str]] = {"": []}
        current = dict(_trained(now.model))
        for path in sorted(
            current.keys() & self._initial.keys()
        ):  # sharded weights are summed in the same order everywhere
            layers[""].append(path)
            layers.setdefault(path.rpartition(".")[0] or path, []).append(path)
        for layer, paths in layers.items():
            absolute, relative = distance([current[p] for p in paths], [self._initial[p] for p in paths])
            suffix = f"/{layer}" if layer else ""
            values[f"absolute{suffix}"] = absolute
            if torch.isfinite(relative):  # a layer that starts at zero has no relative distance
                values[f"relative{suffix}"] = relative
        return values

    def state_dict(self) -> dict[str, Any]:
        return {"initial": self._initial}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._initial = dict(state["initial"])


def _trained(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(clean_path(path), p) for path, p in model.named_parameters() if p.requires_grad]
