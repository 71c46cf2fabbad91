"""The ledger of conserved quantities as a probe of `excite.watch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from excite._core.calls import Pick
from excite._core.checks import check_count, check_flag, check_number, is_flag
from excite.errors import InputError
from excite.probes.base import Deferred, Every, Measurement, Probe, Schedule, StepContext
from excite.probes.conserved.integrals.sums import TranslationEntry
from excite.probes.conserved.ledger import Ledger, Snapshot, conservation
from excite.probes.conserved.unchecked import REASONS
from excite.probes.conserved.update_terms import PARTS
from excite.probes.findings import MAX_NAMED, Finding, MetricSeries, Panel, finite
from excite.wiring.tracing import Wiring

_UNEXPLAINED = 1e-2  # residual, over the squared weights, above which there is a warning


class Conservation(Probe):
    """Drift of the conserved quantities of a model and what explains it.

    A law L is conserved under gradient flow: per channel, Σ w² of the weights that produce it minus Σ w² of those that consume
    it. The probe follows every optimizer step and records on its schedule. The watch needs `optimizer=`, and an `example`
    unless a wiring is given.

    Records:
        ``conservation/drift/L``: largest |value − value at the start| over the channels, relative to their squared weights.
        ``conservation/rest/L``: the same of the residual that no term explains, while every step was checked.
        ``conservation/PART/L``: fraction of the drift explained by a term (step, decay, momentum, …), for the terms that occur;
        signed, and together with the residual they sum to 1.
        ``conservation/unchecked/L``: fraction of the steps in which the law was not checked because the update could not be
        predicted from the gradient; recorded once there is such a step.
        ``conservation/label/KEY``: 1 for each reason (`excite.probes.conserved.unchecked.REASONS`).
        ``conservation/drift/LAYER/translation``, ``conservation/rest/LAYER/translation``: the same of the sums of the last layer over the
        classes, relative to their absolute values; for SGD under softmax cross-entropy of the outputs, else not recorded.
        ``conservation/off-diagonal/L``: with `off_diagonal`, largest residual off the diagonal of the law's matrix.

    Args:
        schedule: When to record. Default: every 10 steps.
        parts: Explain the drift. False records the drift alone, from the current weights, without work between records.
        wiring: What `excite.trace` returned. Default: traced on the example.
        output: Which part of the model's return value is the output, if it returns several.
        off_diagonal: Also follow the whole matrix of each law, up to this many channels (True: 256); slower.
        tolerance: Flag a step whose residual exceeds this fraction of the squared weights. Default: as for
            `excite.probes.conservation`.

    Raises:
        InputError: If an argument is not what is expected.

    Example:
        >>> from excite.probes import Conservation, Every
        >>> watch = excite.watch(model, example=x, optimizer=optimizer, probes=[Conservation(Every(100))])
    """

    name = "conservation"
    requires = ("example", "optimizer")
    panel = Panel(
        "balance",
        "Balance of the layers",
        "What gradient flow would conserve between layers (squared weights that make a channel minus those that read it). "
        "“Moved” is the change since the start, “unexplained” what step size, momentum and decay do not account for: it "
        "should stay near zero. “Not checked” are steps whose update could not be predicted: they say nothing about the law.",
        (
            ("drift", "moved since the start"),
            ("rest", "unexplained"),
            ("unchecked", "fraction of the steps that were not checked"),
        ),
        order=60,
        hidden=("label",),
        docs="conservation.md#entries",
    )
    reduction = "first"  # every process holds the same weights

    def __init__(
        self,
        schedule: Schedule | None = None,
        *,
        parts: bool = True,
        wiring: Wiring | None = None,
        output: Pick = None,
        off_diagonal: bool | int = False,
        tolerance: float | None = None,
    ):
        super().__init__(Every(10) if schedule is None else schedule)
        parts = check_flag(parts, "Conservation: parts")
        if not is_flag(off_diagonal):
            off_diagonal = check_count(off_diagonal, "Conservation: off_diagonal", also="True or False")
        tolerance = None if tolerance is None else check_number(tolerance, "Conservation: tolerance", 0)
        if off_diagonal and not parts:
            raise InputError("Conservation: off_diagonal needs every step: leave out parts=False")
        self.parts = parts
        self._options = {
            "wiring": wiring, "output": output, "off_diagonal": off_diagonal, "tolerance": tolerance
        }  # fmt: skip
        self.ledger: Ledger | None = None

    def attach(self, ctx: StepContext) -> None:
        """Opens the ledger; called by `excite.watch`."""
        if ctx.optimizer is None:
            raise InputError("Conservation needs the optimizer: excite.watch(model, optimizer=optimizer, ...)")
        options = dict(self._options)
        if options["wiring"] is None and ctx.example is not None:
            options["wiring"] = ctx.wiring(options["output"])  # type: ignore[arg-type]
        self.ledger = conservation(ctx.model, ctx.optimizer, ctx.example, **options)  # type: ignore[arg-type]
        if not self.parts:
            self.ledger.close()  # its hooks are what takes time; the start is in the accumulator

    def detach(self) -> None:
        """Removes hooks and releases memory; called when the watch is closed."""
        if self.ledger is not None:
            self.ledger.close()

    def measure(self, ctx: StepContext) -> Measurement:
        """Measures drift and residual of every conserved quantity."""
        ledger = self.ledger
        if ledger is None or not ledger.laws:
            return {}
        snapshot, translations = ledger.snapshot(), ledger.translations() if self.parts else []
        if not self._options["off_diagonal"]:
            compute = partial(self._values, snapshot, translations)
            return Deferred(compute, prepare=ledger.commit, on_device=ledger.device.type != "cpu")
        ledger.commit()
        values = self._values(snapshot, translations)
        for entry in ledger.read().entries:
            if entry.off_diagonal is not None:
                values[f"off-diagonal/{entry.name}"] = entry.off_diagonal.relative
        return values

    def _values(self, snapshot: Snapshot, translations: Sequence[Callable[[], TranslationEntry]]) -> dict[str, float]:
        assert self.ledger is not None
        row = snapshot.summary()
        values = {f"drift/{name}": drift for name, drift in zip(row.names, row.drift)}
        if self.parts:
            unchecked, steps = self.ledger.unchecked, self.ledger.steps
            values |= {
                f"rest/{name}": residual for name, residual in zip(row.names, row.residual) if name not in unchecked
            }
            values |= {f"unchecked/{name}": unchecked.fraction(name, steps) for name in row.names if name in unchecked}
            values |= {f"label/{key}": 1.0 for key in unchecked.keys}
            for term, fractions, occurs in zip(PARTS, row.fractions, row.occurs):
                values |= {
                    f"{term}/{name}": fraction for name, fraction, yes in zip(row.names, fractions, occurs) if yes
                }
        for entry in (compute() for compute in translations):
            if entry.why is None:
                values |= {f"drift/{entry.name}": entry.moved, f"rest/{entry.name}": entry.relative}
        return values

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, for a checkpoint."""
        return {} if self.ledger is None else self.ledger.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        if self.ledger is not None and state:
            self.ledger.load_state_dict(state)

    @classmethod
    def default(cls, output: Pick = None) -> Conservation:
        """Returns the probe as `default_probes` uses it."""
        return cls(Every(50), parts=False, output=output)

    @classmethod
    def findings(cls, history: MetricSeries) -> list[Finding]:
        """Returns what a report says about these metrics."""
        return _balance(history)


def _balance(history: MetricSeries) -> list[Finding]:
    def last(key: str) -> dict[str, float]:
        return {law: float(finite(s)[1][-1]) for law, s in history.layers(key).items() if len(finite(s)[1])}

    unchecked = last("conservation/unchecked")
    rests = {law: residual for law, residual in last("conservation/rest").items() if law not in unchecked}
    moved = last("conservation/drift")
    worst = max(rests, key=lambda law: rests[law], default=None)
    if worst is not None and rests[worst] > _UNEXPLAINED:
        text = (
            f"The balance of {worst} drifted by {rests[worst]:.1%} of its squared weights without an explanation by step size, "
            "momentum or decay: something else changes these weights."
        )
        action = "Look for what else writes to these weights, such as clamping, weight averaging or normalization."
        return [Finding("warning", text, action), *_unchecked(unchecked, history)]
    checked = [value for law, value in moved.items() if law not in unchecked]
    if checked and max(checked) > 0:
        tail = f"; step size, momentum and decay explain it to within {max(rests.values()):.1g}" if rests else ""
        text = f"The balance of layers moved by up to {max(checked):.2%} of the squared weights{tail}."
        return [Finding("note", text), *_unchecked(unchecked, history)]
    return _unchecked(unchecked, history)


def _unchecked(laws: Mapping[str, float], history: MetricSeries) -> list[Finding]:
    """Laws whose drift is explained by definition, and why."""
    if not laws:
        return []
    names = list(laws)
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    reasons = [REASONS.get(key, key) for key in history.layers("conservation/label")]
    why = f": {'; '.join(reasons)}" if reasons else ""
    return [Finding("note", f"The balance of {', '.join(names[:MAX_NAMED])}{more} was not checked{why}.")]
