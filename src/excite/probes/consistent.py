"""Assumption 1 of *What training reveals*: do activation patterns and slopes at fixed points still change?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from excite.errors import InputError, ModelError
from excite.probes.protocol import Every, Moment, Probe, Schedule, Values
from excite.wiring.affine import AffineCall, AffineMode, Names
from excite.wiring.calling import Pick, batch_size, call, own_copy, pick_output, tensors
from excite.wiring.untouched import evaluating


@dataclass(frozen=True)
class Consistent:
    """Over `looks` looks: `gamma` is the smallest γ with λ_t(x) ≤ (1 + γ) λ_t'(x) for all points and looks, infinite if a slope
    was 0 and then not; `changed` the share of points whose activation pattern was not the same at all of them."""

    gamma: float
    changed: float
    looks: int

    @property
    def holds(self) -> bool:
        """Whether no pattern changed. Between looks it may have."""
        return self.changed == 0


def consistency(patterns: Tensor, slopes: Tensor) -> Consistent:
    """From one pattern (or a hash of it) and one slope for each look and point: (looks, N, ...) and (looks, N)."""
    if slopes.dim() != 2 or patterns.shape[:2] != slopes.shape or not slopes.numel():
        raise InputError(
            f"expected patterns (looks, N, ...) and slopes (looks, N); got {tuple(patterns.shape)} and {tuple(slopes.shape)}"
        )
    same = (patterns == patterns[:1]).reshape(*slopes.shape, -1).all(2).all(0)
    most, least = slopes.amax(0), slopes.amin(0)
    ratio = torch.where(most > 0, most / least, 1.0)
    return Consistent(float(ratio.max()) - 1, float((~same).double().mean()), len(slopes))


class _Patterns(AffineMode):
    """Signs of the outputs of every affine call."""

    def __init__(self, names: Names, samples: int):
        super().__init__(names)
        self.samples = samples
        self.signs: list[Tensor] = []

    def visit(self, call: AffineCall) -> Tensor:
        output = call.run(call.input)
        if output.dim() and len(output) == self.samples:
            self.signs.append((output.detach() > 0).reshape(self.samples, -1))
        return output


def patterns_and_slopes(model: nn.Module, x: Tensor, output: Pick = None) -> tuple[Tensor, Tensor]:
    """Which hidden units are active (N, units), and ‖∇f‖₂ (N,), in evaluation mode; the model is left as it was.

    Signs of the outputs of all affine calls but the last: what ReLU-like activations make of them. One output.
    """
    mode = _Patterns(Names(model), batch_size(x))
    with evaluating(model), torch.enable_grad():
        leaf = x.detach().clone().requires_grad_()
        with mode:
            f = pick_output(call(model, leaf.clone()), output)
        if f.numel() != len(x):
            raise ModelError(f"expected a model with one output; got outputs of shape {tuple(f.shape)}")
        (gradient,) = torch.autograd.grad(f.sum(), leaf, materialize_grads=True)
    hidden = mode.signs[:-1]
    signs = torch.cat(hidden, 1) if hidden else torch.zeros(len(x), 0, dtype=torch.bool, device=x.device)
    return signs, torch.linalg.vector_norm(gradient.flatten(1), dim=1)


class Consistency(Probe):
    """On the example, between this look and the last: `consistency/points`, the share of points whose activation pattern
    changed, `consistency/units`, the share of units that switched, and `consistency/gamma`, the largest factor between the
    two slopes at a point, less 1.

    `since(step)` judges all looks from a step on (Assumption 1); it keeps one number and one hash for each look and point.
    """

    name = "consistency"
    reduction = "max"

    def __init__(self, schedule: Schedule | None = None, *, output: Pick = None):
        super().__init__(schedule or Every(100))
        self.output = output
        self._last: Tensor | None = None
        self._looks: list[tuple[int, Tensor, Tensor]] = []  # step, hashes of the patterns, slopes

    def measure(self, now: Moment) -> Values:
        if (
            now.example is None
            or not isinstance(now.example, Tensor)
            or not tensors(now.example)[0].is_floating_point()
        ):
            raise InputError(
                "the consistency probe needs an example batch, one tensor: excite.watch(model, example=x, ...)"
            )
        signs, slopes = patterns_and_slopes(now.model, own_copy(now.example), self.output)  # type: ignore[arg-type]
        signs, slopes = signs.cpu(), slopes.cpu()
        before, self._last = self._last, signs
        generator = torch.Generator().manual_seed(0)
        keys = torch.randint(-(2**62), 2**62, (signs.shape[1],), generator=generator)
        self._looks.append((now.step, torch.where(signs, keys, 0).sum(1), slopes))
        if before is None or len(self._looks) < 2:
            return {}
        ends = torch.stack([self._looks[-2][2], slopes])
        ratio = torch.where(ends.amax(0) > 0, ends.amax(0) / ends.amin(0), 1.0)
        return {
            "points": (signs != before).any(1).double().mean(),
            "units": (signs != before).double().mean() if signs.shape[1] else 0.0,
            "gamma": ratio.max() - 1,
        }

    def since(self, step: int = 0) -> Consistent:
        kept = [(hashes, slopes) for at, hashes, slopes in self._looks if at >= step]
        if not kept:
            raise InputError(
                f"no look at or after step {step}: the last one was at {self._looks[-1][0] if self._looks else None}"
            )
        hashes, slopes = (torch.stack(column) for column in zip(*kept))
        return consistency(hashes, slopes)

    def state_dict(self) -> dict[str, Any]:
        if not self._looks:
            return {}
        steps, hashes, slopes = zip(*self._looks)
        return {"steps": list(steps), "hashes": torch.stack(hashes), "slopes": torch.stack(slopes), "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._looks = list(zip(state["steps"], state["hashes"], state["slopes"])) if state else []
        self._last = state.get("last")
