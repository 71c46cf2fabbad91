"""Report of a ledger, as values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from excite._core.compatibility import renamed_fields, renamed_keywords
from excite.errors import InputError
from excite.probes.conserved.integrals.sums import TranslationEntry
from excite.probes.conserved.off_diagonal import Matrix
from excite.wiring.groups import Group


@dataclass(frozen=True)
class Unchecked:
    """Channels without a law that could be kept, and why."""

    name: str
    channels: int
    why: str


@renamed_fields(rest="residual", parts="terms")
@dataclass(frozen=True)
class LedgerEntry:
    """One law: per channel, Σ w² over its producers minus Σ w² over its consumers, each with its multiplicity.

    drift = value − start = Σ terms + residual. All tensors have shape (channels,).

    Attributes:
        name: Name of the law: the layer of its first producer.
        group: Channel group of the wiring.
        value: Current value.
        start: Value at the start.
        drift: value − start.
        residual: What no term explains of the drift.
        terms: Explained terms of the drift, by name (step, decay, momentum, …).
        scale: Σ w² over producers and consumers, the larger of then and now; residuals are relative to it.
        worst: Largest residual of a single step.
        worst_step: The step of `worst`.
        flagged: First step whose residual exceeded the tolerance, or −1; the next step if weights changed since the last one.
        off_diagonal: The law's matrix off its diagonal, if requested.
        tolerance: Largest residual of a step, over the scale, that counts as rounding.
        why: Why the law is not checked, or None. Where an update is not predicted from the gradient, nothing can be flagged.
        integral: The value after the last step, integrated from the start and the squared updates alone; NaN where the equations do not
            apply (optimizers other than SGD, Nesterov's momentum, settings that differ within the law).

    Example:
        >>> with excite.probes.conservation(model, optimizer, x) as ledger:
        ...     model(x).square().mean().backward()
        ...     optimizer.step()
        >>> entry = ledger.read()["0"]
        >>> entry.law, tuple(entry.drift.shape), sorted(entry.terms)
        ('channel', (8,), [...'step'...])
    """

    name: str
    group: Group = field(repr=False)
    value: Tensor
    start: Tensor
    drift: Tensor
    residual: Tensor
    terms: Mapping[str, Tensor]
    scale: Tensor
    worst: Tensor
    worst_step: Tensor
    flagged: Tensor
    off_diagonal: Matrix | None
    tolerance: float
    why: str | None = None  # why the law is not checked, if it is not: its change was taken as it came
    integral: Tensor | None = None

    @property
    def law(self) -> str:
        """Name of the conservation law."""
        return self.group.law

    @property
    def relative(self) -> float:
        """The largest |residual| / scale over the channels; NaN if a weight is not finite."""
        return self._over(self.residual)

    @property
    def moved(self) -> float:
        """The largest |drift| / scale over the channels."""
        return self._over(self.drift)

    @property
    def integral_error(self) -> float:
        """The largest |value − integral| / scale over the channels; NaN where there is no integral."""
        return float("nan") if self.integral is None else self._over(self.value - self.integral)

    @renamed_keywords(part="term")
    def share(self, term: str) -> float:
        """Fraction of the drift that a term makes up, over all channels: Σ term·drift / Σ drift². The fractions sum to one."""
        total = float(self.drift.square().sum())
        amount = self.residual if term == "rest" else self.terms[term]
        return float((amount * self.drift).sum()) / total if total else 0.0

    @property
    def first_flag(self) -> int | None:
        """The first step whose residual was too large for rounding."""
        steps = self.flagged[self.flagged >= 0]
        return int(steps.min()) if len(steps) else None

    @property
    def state(self) -> Literal["holds", "flagged", "not checked"]:
        """A flag refutes a law whether or not the other steps were checked."""
        if self.first_flag is not None or not bool(torch.isfinite(self.residual).all()):
            return "flagged"
        return "holds" if self.why is None else "not checked"

    @property
    def holds(self) -> bool:
        """Every step was checked, none left a residual beyond the tolerance, and every number is finite."""
        return self.state == "holds"

    def _over(self, amount: Tensor) -> float:
        scale = torch.where(self.scale > 0, self.scale, torch.ones_like(self.scale))
        return float((amount.abs() / scale).max()) if len(amount) else 0.0


@dataclass(frozen=True)
class LedgerReport:
    """All laws after a number of steps. `report[name]` is the entry of a law; printing shows a table.

    Attributes:
        steps: Optimizer steps accumulated.
        entries: One `LedgerEntry` per law.
        unchecked: Channels without a law, and why.
        precision: Lowest precision of the weights, whose rounding limits what can be detected.
        tolerance: Largest residual of a step, over the squared weights, that counts as rounding.
        rule: Name of the optimizer's update formula; "measured" if there is none, so that its updates are not checked.
        translations: Sums over the classes of the last layer, conserved under softmax cross-entropy.

    Example:
        >>> with excite.probes.conservation(model, optimizer, x) as ledger:
        ...     model(x).square().mean().backward()
        ...     optimizer.step()
        >>> report = ledger.read()
        >>> [entry.name for entry in report.entries], report.rule
        (['0'], 'sgd')
    """

    steps: int
    entries: tuple[LedgerEntry, ...]
    unchecked: tuple[Unchecked, ...]
    precision: torch.dtype  # of the weights, the lowest; rounding in it bounds what can be detected
    tolerance: float
    rule: str  # the optimizer's formula; "measured": it is not known, its update is taken as it comes and not checked
    translations: tuple[TranslationEntry, ...] = ()

    def __getitem__(self, name: str) -> LedgerEntry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise InputError(f"no law {name!r}: there are {', '.join(entry.name for entry in self.entries) or 'none'}")

    @property
    def holds(self) -> bool:
        """Every law was checked at every step and held; False if there was none, or no step to check.

        Sums over classes count where they were checked: they are conserved under cross-entropy only.
        """
        flagged = any(entry.state == "flagged" for entry in self.translations)
        return self.steps > 0 and bool(self.entries) and all(entry.holds for entry in self.entries) and not flagged

    def between(self, names: Iterable[str]) -> float:
        """Drift of the sum of several laws over all their channels: what enters those channels minus what leaves them.

        The law of one group is layer against layer; the groups between two cuts give one cut against the other (Lemma 4).
        """
        return sum(float(self[name].drift.sum()) for name in names)

    def __str__(self) -> str:
        lines = [f"{self.steps} steps, {str(self.precision).removeprefix('torch.')}, optimizer: {self.rule}"]
        shown = [
            term for term in self.entries[0].terms if any(bool((e.terms[term] != 0).any()) for e in self.entries)
        ] if self.entries else []  # fmt: skip
        width = max([len(e.name) for e in self.entries] + [3])
        if self.entries:
            head = "".join(f"{term:>11}" for term in shown)
            lines.append(f"{'law':<{width}}  {'kind':<8}{'channels':>8}{'drift':>11}{head}{'residual':>11}")
        for e in self.entries:
            cells = "".join(f"{e.share(term):>11.1%}" for term in shown)
            lines.append(
                f"{e.name:<{width}}  {e.law:<8}{e.group.channels:>8}{e.moved:>11.2e}{cells}{e.relative:>11.1e}{self._flag(e)}"
            )
            if e.off_diagonal is not None:
                status = "conserved" if e.off_diagonal.exact else "no law off the diagonal"
                lines.append(f"{'':<{width}}    off the diagonal: residual {e.off_diagonal.relative:.1e} ({status})")
        lines += [_translation_line(entry) for entry in self.translations]
        lines += [f"{u.name}: no law for {u.channels} channels: {u.why}" for u in self.unchecked]
        if not self.entries and not self.unchecked and not self.translations:
            lines.append("nothing to check: no channels lie between two layers")
        return "\n".join(lines)

    def _flag(self, entry: LedgerEntry) -> str:
        """The reason why a law is flagged, for the end of its line."""
        if not bool(torch.isfinite(entry.residual).all()):
            return "  not finite" + ("" if entry.first_flag is None else f" since step {entry.first_flag}")
        if entry.first_flag is None:
            if not self.steps:
                return "  no step to check yet"
            return "" if entry.why is None else f"  not checked: {entry.why}"
        if entry.first_flag > self.steps:
            return f"  changed after step {self.steps}, not by the optimizer"
        return f"  residual at step {entry.first_flag}"


def _translation_line(entry: TranslationEntry) -> str:
    if entry.why is not None:
        return f"{entry.name}: sums over the classes not checked: {entry.why}"
    flag = "" if entry.state == "holds" else "  changed, not by the optimizer"
    return f"{entry.name}: sums over the classes moved by {entry.moved:.1e}, residual {entry.relative:.1e}{flag}"
