"""The report on one spike of the loss: who moved first, and what is known to help."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from excite.probes.findings import number, with_role
from excite.probes.flight_recorder.spikes import Mover

LABELS = {
    "gradient": "the gradient", "update": "the update", "m": "Adam's first moment", "v": "Adam's second moment", "residual": "the residual stream",
}  # fmt: skip
_NAMED = 8  # movers in a report
_ATTENTION = ("attn", "attention", "q_proj", "k_proj", "query", "key", "qkv", "in_proj")


@dataclass
class SpikeEvent:
    """A spike of the loss.

    Attributes:
        step: The step at which the rule became true.
        before: Mean loss of the steps before.
        limit: What the loss exceeded.
        loss: The loss at that step.
        movers: Series that left their usual range, the first one first.
        head: The head whose largest attention logit grew most, with its values before and last, if they were measured.
        curves: Values by series around the event, with "step" and "loss".
        roles: What layers and heads do, by name (`Wiring.roles`).
    """

    step: int
    before: float
    limit: float
    loss: float
    movers: Sequence[Mover] = ()
    head: tuple[str, float, float] | None = None
    curves: Mapping[str, list[float | None]] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)

    @property
    def first(self) -> Mover | None:
        """The first mover that belongs to a layer; else the first one."""
        return next((mover for mover in self.movers if mover.layer), next(iter(self.movers), None))

    @property
    def help(self) -> list[str]:
        """Known remedies for spikes of this kind."""
        first = self.first
        if first is None:
            return ["Look at the batches of these steps."]
        if first.lead < 0:
            return ["Look at the batches of these steps: the loss moved before any layer."]
        help_lines = []
        if any(word in first.layer.lower() for word in _ATTENTION) or self.head is not None:
            help_lines.append("Normalize queries and keys (QK-norm).")
        if first.quantity in ("update", "m", "v"):
            help_lines.append("Use a smaller β₂, such as 0.95, so that the second moment follows faster.")
        if first.layer:
            help_lines.append(f"Lower the learning rate at {with_role(first.layer, self.roles)}.")
        if first.quantity == "gradient":
            help_lines.append("Clip gradients, and look at the batches of these steps.")
        if first.quantity == "residual":
            help_lines.append(
                "Scale down the initial weights that write to the residual stream, or normalize the outputs of blocks."
            )
        return help_lines

    def __str__(self) -> str:
        loss = number(self.loss) if math.isfinite(self.loss) else str(self.loss)
        text = f"the loss spiked at step {self.step:,}, from {number(self.before)} to {loss}"
        if not math.isfinite(self.before):  # there were no losses before
            text = f"the loss is {loss} at step {self.step:,}"
        first = self.first
        if first is None:
            return f"{text}; no recorded series moved before it"
        of_layer = f" of {with_role(first.layer, self.roles)}" if first.layer else ""
        size = f"{number(first.times)} times its usual size" if math.isfinite(first.times) else "not finite"
        lead = (
            f"{first.lead} step{'s' if first.lead > 1 else ''} before the loss"
            if first.lead > 0
            else "with the loss"
            if first.lead == 0
            else "after the loss"
        )
        head = (
            f"; the attention logits of {with_role(self.head[0], self.roles)} grew from {number(self.head[1])} to {number(self.head[2])}"
            if self.head
            else ""
        )
        return f"{text}; first {LABELS[first.quantity]}{of_layer}, {size} at step {first.step:,}, {lead}{head}"

    def to_dict(self) -> dict[str, Any]:
        """Fields for JSON; numbers that are not finite are None."""
        head = None
        if self.head is not None:
            name, before, last = self.head
            head = {"name": name, "role": self.roles.get(name, ""), "before": before, "last": last}
        return {
            "step": self.step,
            "loss": _plain(self.loss),
            "before": _plain(self.before),
            "limit": _plain(self.limit),
            "first": None if self.first is None else self._mover(self.first),
            "movers": [self._mover(mover) for mover in self.movers[:_NAMED]],
            "head": head,
            "help": self.help,
            "curves": {name: list(values) for name, values in self.curves.items()},
        }

    def _mover(self, mover: Mover) -> dict[str, Any]:
        return mover.to_dict() | {"times": _plain(mover.times), "role": self.roles.get(mover.layer, "")}

    def series(self, columns: Sequence[tuple[str, str]]) -> list[int]:
        """Which series to keep: those of the whole network, and of the first movers."""
        named = [(mover.quantity, mover.layer) for mover in self.movers[:_NAMED]]
        return [i for i, column in enumerate(columns) if not column[1] or column in named]


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
