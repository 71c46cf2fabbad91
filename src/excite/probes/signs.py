"""Signs of the weights: how many change, when the last one did, and whether the stable sign regime holds.

Assumption 1 of the training-invariances paper: from some step t₀ on, sgn(w(t)) = sgn(w(t₀)) for every weight, with
sgn(0) = 1. It can be refuted by measurements, never proven: the probe reports since which step it has held.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from excite._core.calls import Pick
from excite._core.checks import check_count, same_shapes
from excite.errors import ModelError
from excite.probes.base import Deferred, Every, Measurement, Probe, Schedule, StepContext, Values
from excite.probes.findings import Finding, MetricSeries, Panel, finite


def sign_changes(before: Iterable[Tensor], after: Iterable[Tensor]) -> Tensor:
    """Fraction of the entries whose sign differs between two lists of tensors, with sgn(0) = 1.

    Args:
        before: Tensors at an earlier step.
        after: Tensors of the same shapes at a later step.

    Returns:
        The fraction, a tensor with one element.

    Raises:
        InputError: If the shapes differ.

    Example:
        >>> from excite.probes import sign_changes
        >>> float(sign_changes([torch.tensor([1.0, -1.0, 0.0, 2.0])], [torch.tensor([-1.0, -2.0, 0.5, 2.0])]))
        0.25
    """
    return _changed(*same_shapes(before, after, "tensors"))


def _changed(before: Iterable[Tensor], after: Iterable[Tensor]) -> Tensor:
    pairs = list(zip(before, after, strict=True))
    changed = sum((((first >= 0) != (other >= 0)).sum() for first, other in pairs), torch.zeros(()))
    return changed / max(sum(first.numel() for first, _ in pairs), 1)


class Signs(Probe):
    """Tracks when each weight last changed its sign.

    Records, for all weights and (except ``stable``) per parameter:
        ``signs/changed``: fraction of the weights whose sign changed within the last `window` steps.
        ``signs/since``: steps since the last observed change, or since the start.
        ``signs/stable``: 1 if no sign changed for at least `window` steps (the stable sign regime), else 0.

    A sign that flips and flips back between two measurements is not detected; use ``Signs(Every(1))`` where that matters. A weight
    that is not finite is an error.

    Args:
        schedule: When to measure. Default: every 10 steps.
        window: Number of steps without a change that counts as stable.

    Raises:
        InputError: If `window` is not a positive whole number.

    Example:
        >>> from excite.probes import Every, Signs
        >>> watch = excite.watch(model, probes=[Signs(Every(1), window=1000)])
    """

    name = "signs"
    panel = Panel(
        "signs",
        "Signs of the weights",
        "The fraction of weights whose sign changed lately. Once no sign changes, the network is in the stable sign regime "
        "that the theory of late training is about.",
        (
            ("changed", "fraction that changed lately"),
            ("since", "steps since any changed"),
            ("stable", "stable (1) or not (0)"),
        ),
        order=80,
        docs="conservation.md#signs-and-directions",
    )
    reduction = "first"

    def __init__(self, schedule: Schedule | None = None, window: int = 100):
        super().__init__(Every(10) if schedule is None else schedule)
        self.window = check_count(window, "Signs: window")
        self._positive: dict[str, Tensor] = {}  # signs at the last measurement
        self._last: dict[str, Tensor] = {}  # step of the measurement that found the last change, −1 for none
        self._start = 0

    def measure(self, ctx: StepContext) -> Measurement:
        """Measures which weights changed their sign."""
        weights = {path: p.detach() for path, p in ctx.parameters.items() if p.requires_grad and p.numel()}
        if not weights:
            return {}
        if not self._positive:
            self._start = ctx.step
        latest, changed = [], []
        for path, w in weights.items():
            positive = w >= 0
            if path not in self._positive:
                self._last[path] = torch.full_like(w, -1, dtype=torch.int32)
            elif self._positive[path].shape != w.shape:
                raise ModelError(f"signs: {path} had shape {tuple(self._positive[path].shape)}, now {tuple(w.shape)}")
            else:
                self._last[path].masked_fill_(positive != self._positive[path], ctx.step)
            self._positive[path] = positive
            latest.append(self._last[path].max())
            changed.append((self._last[path] > max(-1, ctx.step - self.window)).sum())
        sizes = {path: w.numel() for path, w in weights.items()}
        result = [_together(column) for column in (latest, changed, torch._foreach_norm(list(weights.values())))]
        compute = partial(self._values, ctx.step, sizes, result)  # without the context and what it holds
        return Deferred(compute) if result[0].is_cuda else compute()

    def _values(self, step: int, sizes: Mapping[str, int], result: Sequence[Tensor]) -> Values:
        latest, changed, norms = (column.tolist() for column in result)
        if not all(map(math.isfinite, norms)):
            raise ModelError(f"signs: a weight is not finite at step {step}")
        since = [step - max(change_step, self._start) for change_step in latest]
        values = {f"changed/{path}": count / size for (path, size), count in zip(sizes.items(), changed)}
        values |= {f"since/{path}": float(steps) for path, steps in zip(sizes, since)}
        values["changed"] = sum(changed) / sum(sizes.values())
        values["since"], values["stable"] = float(min(since)), float(min(since) >= self.window)
        return values

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, for a checkpoint."""
        return {"positive": dict(self._positive), "last": dict(self._last), "start": self._start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        self._positive, self._start = dict(state["positive"]), int(state["start"])
        self._last = {path: last.clone() for path, last in state["last"].items()}

    @classmethod
    def default(cls, output: Pick = None) -> Signs:
        """Returns the probe as `default_probes` uses it."""
        return cls(Every(50))

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        return _signs(history)


def _together(scalars: Iterable[Tensor]) -> Tensor:
    """One vector, whole numbers where shards have parts of them, on the device of the first."""
    full = [scalar.full_tensor() if hasattr(scalar, "full_tensor") else scalar for scalar in scalars]
    return torch.stack([scalar.to(full[0].device) for scalar in full])


def _signs(history: MetricSeries) -> list[Finding]:
    stable, since = finite(history["signs/stable"]), finite(history["signs/since"])
    if not len(stable[1]) or not len(since[1]):
        return []
    steps, last_step = int(since[1][-1]), int(since[0][-1])
    if stable[1][-1] > 0.5:
        return [
            Finding(
                "note",
                f"No weight has changed its sign for {steps:,} steps, since step {last_step - steps:,}: the stable sign regime has held since then.",
            )
        ]
    changed = finite(history["signs/changed"])[1]
    if not len(changed):
        return []
    return [Finding("note", f"Signs still change: {changed[-1]:.2%} of the weights changed theirs lately.")]
