"""The whole matrix of a law, Σ R R' of producers minus Σ R R' of consumers: conserved off its diagonal, or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from excite.probes.conserved.laws import NamedLaw
from excite.wiring.groups import Group

_MAX_ENTRIES = 256


@dataclass(frozen=True)
class Matrix:
    """Off-diagonal entries of one law since the start, as (channels, channels) matrices with zeros on the diagonal.

    `drift` is M − M₀; `step` is Σ η² (G G' of producers − of consumers), which explains all of it where the law is
    "matrix" and the optimizer plain SGD; `residual` is the difference. `exact` says whether that law is claimed.
    """

    drift: Tensor
    step: Tensor
    scale: float  # ‖Σ R R'‖ of producers plus that of consumers, Frobenius
    exact: bool

    @property
    def residual(self) -> Tensor:
        """The residual: drift − step."""
        return self.drift - self.step

    @property
    def relative(self) -> float:
        """Largest residual over the scale."""
        return float(self.residual.abs().max()) / self.scale if self.scale else float(self.residual.abs().max())


def law_matrix(group: Group, tensors: Mapping[str, Tensor], weights: Mapping[str, float] | None = None) -> Tensor:
    """Σ R R' over producers minus Σ R R' over consumers, in float64; `weights` multiply the parts by parameter."""
    return _side(group.producers, tensors, weights) - _side(group.consumers, tensors, weights)


def _side(sites: Any, tensors: Mapping[str, Tensor], weights: Mapping[str, float] | None) -> Tensor:
    total: Tensor | None = None
    for site in sites:
        rows = site.rows(tensors[site.parameter].detach()).double()
        gram = rows @ rows.T * (site.times * (1.0 if weights is None else weights[site.parameter]))
        total = gram if total is None else total + gram
    return torch.zeros((), dtype=torch.float64) if total is None else total


class OffDiagonal:
    """Keeps M₀ and Σ η² (G G' …) of every law of at most `most` channels."""

    def __init__(self, laws: Sequence[NamedLaw], parameters: Mapping[str, Tensor], max_entries: bool | int):
        limit = _MAX_ENTRIES if max_entries is True else int(max_entries)
        self._parameters = parameters
        self._groups = {law.name: law.group for law in laws if 1 < law.group.channels <= limit}
        self._start = {name: law_matrix(group, parameters) for name, group in self._groups.items()}
        self._step = {name: torch.zeros_like(matrix) for name, matrix in self._start.items()}

    def after(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Adds the term of one step: the squared learning rate times the law of the gradients."""
        grads = {path: p.grad for path, p in self._parameters.items() if p.grad is not None}
        squares = {path: float(setting.get("lr", 0.0)) ** 2 for path, setting in settings.items()}
        for name, group in self._groups.items():
            if all(site.parameter in grads for site in (*group.producers, *group.consumers)):
                self._step[name] += law_matrix(group, grads, squares)

    def read(self, name: str) -> Matrix | None:
        """Returns the drift of a group's matrix and its terms, or None if it is not followed."""
        if name not in self._groups:
            return None
        group = self._groups[name]
        off = 1 - torch.eye(group.channels, dtype=torch.float64)
        drift = (law_matrix(group, self._parameters) - self._start[name]).cpu()
        sides = [_side(sites, self._parameters, None) for sites in (group.producers, group.consumers)]
        scale = sum(float(side.norm()) for side in sides)
        return Matrix(drift * off, self._step[name].cpu() * off, scale, group.law == "matrix")

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, for a checkpoint."""
        return {
            "start": {name: matrix.clone() for name, matrix in self._start.items()},
            "step": {name: matrix.clone() for name, matrix in self._step.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        for own, loaded in ((self._start, state["start"]), (self._step, state["step"])):
            for name in own:
                own[name] = loaded[name].to(own[name]).clone()
