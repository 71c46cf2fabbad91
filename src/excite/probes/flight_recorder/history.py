"""The last steps on the host: when the loss spikes, what moved before, and what is about to."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from excite.probes.findings import with_role
from excite.probes.flight_recorder.event import LABELS, SpikeEvent
from excite.probes.flight_recorder.spikes import LOOKBACK, Baseline, Floats, SpikeRule, first_movers

_AFTER = 30  # steps after a spike that its curves show
_WARN_QUIET, _WARN_GAP, _WARN_ROWS = (
    100,
    10,
    3,
)  # steps of the baseline of warnings, between it and now, and steps in a row
_WARN_AGAIN = 200  # steps until the next warning
_WARN_TIMES = 2.0  # the usual size: updates double before a spike (marin#1368)
_MAX_EVENTS = 50


class FlightHistory:
    """Keeps the last steps, and finds spikes and their first movers among them.

    Args:
        columns: (quantity, layer) of each series.
        rule: When the loss spikes.
        steps: Number of steps to keep.
        warn: Whether to look for series that move before the loss does.
    """

    def __init__(self, columns: Sequence[tuple[str, str]], rule: SpikeRule, steps: int, warn: bool = True):
        self.columns, self.rule, self.warn = list(columns), rule, warn
        self.events: list[SpikeEvent] = []  # complete, not yet taken
        self.messages: list[str] = []
        self.count = 0
        self.roles: Mapping[str, str] = {}  # what layers and heads do, by name
        self._rows: deque[tuple[int, float, float, Floats]] = deque(maxlen=steps)  # step, loss, rate, values
        self._heads: deque[tuple[int, dict[str, float]]] = deque(maxlen=8)
        self._unfinished: SpikeEvent | None = None  # waits for the steps after it
        self._limit: float | None = None  # below which the loss has to fall before the next spike counts
        self._baseline: tuple[int, Baseline] | None = None
        self._warned = -_WARN_AGAIN

    def add(self, step: int, loss: float, rate: float, values: Floats) -> None:
        """Adds one step: its loss, its learning rate (NaN if it is not known) and the value of each series."""
        self._rows.append((step, loss, rate, values))
        if self._unfinished is not None and step >= self._unfinished.step + _AFTER:
            self.finish()
        losses = [row[1] for row in self._rows]
        if self._limit is not None:
            self._limit = None if math.isfinite(loss) and loss <= self._limit else self._limit
        elif not math.isnan(loss) or len(losses) > 1:
            if self.rule.spikes(losses) and self.count < _MAX_EVENTS and not _unknown(losses):
                self._spike(step, loss, losses)
            elif self.warn:
                self._early(step)

    def add_heads(self, step: int, logits: Mapping[str, float]) -> None:
        """Adds the largest attention logit of each head, where it was measured."""
        self._heads.append((step, dict(logits)))

    def finish(self) -> None:
        """Completes the report that waits for the steps after its spike."""
        event, self._unfinished = self._unfinished, None
        if event is not None:
            retained = event.series(self.columns)
            steps, losses, table = self.arrays(scaled=False)
            around = steps >= event.step - 2 * LOOKBACK
            curves: dict[str, list[float | None]] = {"step": steps[around].tolist(), "loss": _listed(losses[around])}
            for i in retained:
                curves["/".join(filter(None, self.columns[i]))] = _listed(table[around, i])
            event.curves = curves
            self.events.append(event)

    def _spike(self, step: int, loss: float, losses: list[float]) -> None:
        limit = self.rule.limit(losses)
        before = [loss_before for loss_before in losses[: -self.rule.recent] if math.isfinite(loss_before)][
            -self.rule.past :
        ]
        mean = float(np.mean(before)) if before else math.nan
        self._limit = mean + self.rule.least if limit is None else limit
        steps, values, table = self.arrays(scaled=True)
        movers = first_movers(steps, values, table, self.columns, step)
        self.finish()
        self.count += 1
        self._unfinished = SpikeEvent(step, mean, self._limit, loss, movers, self._grown(step), roles=self.roles)
        self.messages.append(f"{self._unfinished}. {' '.join(self._unfinished.help)}")

    def _grown(self, step: int) -> tuple[str, float, float] | None:
        """The head whose largest logit grew most, and by more than 1, between the last two measurements."""
        if len(self._heads) < 2:
            return None
        (_, before), (_, after) = self._heads[-2], self._heads[-1]
        growth = {
            name: value - before[name] for name, value in after.items() if name in before and math.isfinite(value)
        }
        head = max(growth, key=growth.__getitem__, default=None)
        return None if head is None or growth[head] < 1 else (head, before[head], after[head])

    def arrays(self, scaled: bool) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], Floats, Floats]:
        """Steps, losses and values (steps, series); `scaled`: updates over the learning rate, which a schedule changes."""
        steps = np.array([row[0] for row in self._rows], dtype=np.int64)
        losses = np.array([row[1] for row in self._rows], dtype=np.float64)
        table = np.stack([row[3] for row in self._rows]) if self._rows else np.zeros((0, len(self.columns)))
        if scaled:
            rates = np.array([row[2] for row in self._rows], dtype=np.float64)
            if np.isfinite(rates).all() and (rates > 0).all():
                updates = np.array([quantity == "update" for quantity, _ in self.columns])
                table = np.where(updates, table / rates[:, None], table)
        return steps, losses, table

    def _early(self, step: int) -> None:
        """A warning if a layer left its usual range three steps in a row while the loss is still in its own."""
        if step % 5 or step - self._warned < _WARN_AGAIN or len(self._rows) < _WARN_QUIET // 2 + _WARN_GAP:
            return
        _, losses, table = self.arrays(scaled=True)
        everything = np.column_stack([losses, table])
        if self._baseline is None or step >= self._baseline[0] + LOOKBACK:
            self._baseline = (step, Baseline(everything[:-_WARN_GAP][-_WARN_QUIET:]))
        excess = np.nan_to_num(self._baseline[1].excess(everything[-_WARN_ROWS:]), nan=0.0).min(0)
        if excess[0] > 1:
            return
        layers = [i for i, (_, layer) in enumerate(self.columns, start=1) if layer]
        usual = np.exp(self._baseline[1].center)
        moved = [i for i in layers if excess[i] > 1 and everything[-1, i] > _WARN_TIMES * usual[i]]
        if not moved:
            return
        worst = max(moved, key=lambda i: float(excess[i]))
        quantity, layer = self.columns[worst - 1]
        times = float(everything[-1, worst] / usual[worst])
        self._warned = step
        others = f", and {len(moved) - 1} other series" if len(moved) > 1 else ""
        self.messages.append(
            f"step {step:,}: {LABELS[quantity]} of {with_role(layer, self.roles)} is {times:.1f} times its usual size{others}; the loss may spike"
        )


def _unknown(losses: Sequence[float]) -> bool:
    """Whether no loss was ever finite: then none is known, which is no spike."""
    return not any(map(math.isfinite, losses))


def _listed(values: Floats) -> list[float | None]:
    return [float(value) if math.isfinite(value) else None for value in values]
