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
    """Distance of parameters to their initial values, ‖θ − θ₀‖₂ and ‖θ − θ₀‖₂ / ‖θ₀‖₂ over all entries.

    Args:
        parameters: The parameters θ.
        initial: The initial values θ₀, of the same shapes.

    Returns:
        The absolute and the relative distance, accumulated in float32 or better.

    Raises:
        InputError: If the shapes differ.

    Example:
        >>> from excite.probes import distance
        >>> absolute, relative = distance([torch.tensor([3.0, 4.0])], [torch.tensor([3.0, 0.0])])
        >>> float(absolute), round(float(relative), 4)
        (4.0, 1.3333)
    """
    return _distance(*same_shapes(parameters, initial, "parameters"))


def _distance(parameters: Iterable[Tensor], initial: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    start = [weight.detach() for weight in initial]
    moved = tensor_norms([p.detach() - weight.to(p.device, p.dtype) for p, weight in zip(parameters, start)]).norm()
    return moved, moved / tensor_norms(start).to(moved.device).norm()


def tensor_norms(tensors: Sequence[Tensor], order: int = 2) -> Tensor:
    """Norms of several tensors, by default Euclidean, (count,) in float64; of the full tensors where these are sharded."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    wide = [tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float() for tensor in tensors]
    norms = [
        tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for tensor in torch._foreach_norm(wide, order)
    ]
    if len({(tensor.dtype, tensor.device) for tensor in norms}) == 1:
        return torch.stack(norms).double()  # few kernels
    return torch.stack([tensor.double().to(norms[0].device) for tensor in norms])


def trainable_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters with requires_grad=True by path, without the prefixes of wrappers."""
    return {clean_path(path): p for path, p in model.named_parameters() if p.requires_grad}


class LayerGroups:
    """Parameters grouped by the module that owns them; the first group, "", holds all of them.

    Args:
        paths: Paths of the parameters, such as "fc1.weight".
    """

    def __init__(self, paths: Iterable[str]):
        self.paths = list(paths)
        groups: dict[str, set[str]] = {"": set(self.paths)}
        for path in self.paths:
            groups.setdefault(path.rpartition(".")[0] or path, set()).add(path)
        self.layers = list(groups)
        self._member = torch.tensor([[path in group for path in self.paths] for group in groups.values()]).double()

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        """Euclidean norm of each group, (groups,) in float64, of tensors in the order of `paths`; left on the device."""
        return self.roots(tensor_norms(tensors).square())

    def roots(self, squares: Tensor) -> Tensor:
        """√Σ over the members of each group, (groups,), of one number per path."""
        self._member = self._member.to(squares.device)
        return (self._member @ squares).sqrt()


class Distance(Probe):
    """Distance of the weights to their initial values.

    Records, for all weights and per module that owns some:
        ``distance/absolute[/LAYER]``: ‖θ − θ₀‖₂.
        ``distance/relative[/LAYER]``: ‖θ − θ₀‖₂ / ‖θ₀‖₂; not for a module whose weights were all zero.

    Args:
        schedule: When to measure. Default: every 10 steps.

    Example:
        >>> from excite.probes import Distance, Every
        >>> watch = excite.watch(model, probes=[Distance(Every(10))])
    """

    name = "distance"
    panel = Panel(
        "distances",
        "Distance to initialization",
        "How far the weights have moved from where they started.",
        (("relative", "‖θ − θ₀‖ / ‖θ₀‖"), ("absolute", "‖θ − θ₀‖")),
        order=40,
        docs="watch.md",
    )
    reduction = "first"  # every process holds the same weights

    def __init__(self, schedule: Schedule | None = None):
        super().__init__(Every(10) if schedule is None else schedule)
        self._initial: dict[str, Tensor] = {}
        self._groups: LayerGroups | None = None
        self._sizes: list[float] = []  # norm of each group at the start

    def attach(self, ctx: StepContext) -> None:
        """Stores the initial weights."""
        if not self._initial:
            self._initial = {path: p.detach().clone() for path, p in trainable_parameters(ctx.model).items()}

    def measure(self, ctx: StepContext) -> Values:
        """Measures the distance of the weights from their initial values."""
        current = {path: p for path, p in ctx.parameters.items() if p.requires_grad and path in self._initial}
        start = [self._initial[path] for path in current]
        if self._groups is None or self._groups.paths != list(current):
            self._groups = LayerGroups(current)
            self._sizes = self._groups.norms(start).tolist()
        moved = self._groups.norms(
            [p.detach() - weight.to(p.device, p.dtype) for p, weight in zip(current.values(), start)]
        )
        values: dict[str, Tensor] = {}
        for layer, size, length in zip(self._groups.layers, self._sizes, moved.unbind()):
            suffix = f"/{layer}" if layer else ""
            values[f"absolute{suffix}"] = length
            if size > 0:  # a layer that starts at zero has no relative distance
                values[f"relative{suffix}"] = length / size
        return values

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, for a checkpoint."""
        return {"initial": self._initial}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        self._initial, self._groups = dict(state["initial"]), None

    @classmethod
    def default(cls, output: Pick = None) -> Distance:
        """Returns the probe as `default_probes` uses it."""
        return cls(Every(50))

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        return _moved(history)


def _moved(history: MetricSeries) -> list[Finding]:
    values = finite(history["distance/relative"])[1]
    if not len(values) or values[-1] <= 0:
        return []
    return [Finding("note", f"The weights have moved by {values[-1]:.0%} of their initial norm.")]
