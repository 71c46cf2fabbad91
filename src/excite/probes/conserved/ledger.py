"""A ledger of what training conserves: at every optimizer step, how far each law moved and what moved it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.background import memoize
from excite._core.calls import Batch, Pick
from excite._core.checks import check_count, check_model, check_norms, check_number, check_weights, is_flag
from excite._core.intercept.affine import clean_path
from excite._core.wrappers import unwrap
from excite.errors import InputError, ModelError
from excite.probes.conserved.accumulator import Accumulator
from excite.probes.conserved.hyperparameters import Settings
from excite.probes.conserved.integrals.sums import TranslationEntry, TranslationSums
from excite.probes.conserved.laws import LawSums, NamedLaw, check_wiring
from excite.probes.conserved.norm_terms import NormTerms
from excite.probes.conserved.off_diagonal import OffDiagonal
from excite.probes.conserved.passes import PassPrecision
from excite.probes.conserved.report import LedgerEntry, LedgerReport, Unchecked
from excite.probes.conserved.step_terms import StepRecord, StepTerms
from excite.probes.conserved.summary import LawRow, LawSummary, Summarizer
from excite.probes.conserved.unchecked import UncheckedSteps
from excite.probes.conserved.update_terms import PARTS, UpdateRule, rule_of
from excite.wiring.groups import Group, named, named_by_number
from excite.wiring.tracing import Wiring, trace
from excite.wiring.translations import Translation

_RECORDS, _BYTES = 64, 1 << 25  # steps that wait to be added together, and the memory they may take
_TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-4,
}  # a residual beyond this fraction of the squared weights is flagged


class Snapshot:
    """The accumulator after one step, filled in by `Ledger.commit` together with those of other steps."""

    def __init__(self, step: int, state: Tensor | None = None):
        self.step = step
        self._state = state
        self._row: Callable[[], LawRow] | None = None

    @property
    def state(self) -> Tensor:
        """(2 + terms, channels): drift, scale and terms."""
        if self._state is None:
            raise InputError("conservation: the accumulator was replaced by that of a checkpoint, or not committed")
        return self._state

    def summary(self) -> LawRow:
        """The state in a few numbers per law; waits for the device."""
        if self._row is None:
            raise InputError("conservation: the accumulator was replaced by that of a checkpoint, or not committed")
        return self._row()


class Ledger:
    """Accumulates the conserved quantities of a model while it trains. Create one with `excite.probes.conservation`.

    An error at a step is not raised into training: accumulation ends there, and reading the ledger raises it.

    Args:
        model: The model.
        optimizer: The optimizer that trains it.
        groups: Channel groups of the model's wiring, one law each.
        off_diagonal: Also follow the whole matrix of each law, up to this many channels (True: 256).
        tolerance: Flag a step whose residual exceeds this fraction of the squared weights; see `conservation`.
        translations: Last layers whose sums over the classes are conserved under softmax cross-entropy (`Wiring.translations`).

    Raises:
        InputError: If the optimizer holds no parameter of the model, or the groups are those of another model.

    Example:
        >>> with excite.probes.conservation(model, optimizer, x) as ledger:
        ...     loss = model(x).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        >>> ledger.read().steps
        1
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[Group],
        off_diagonal: bool | int = False,
        tolerance: float | None = None,
        translations: Sequence[Translation] = (),
    ):
        self.model, self.optimizer = unwrap(model), optimizer
        parameters = {clean_path(path): p for path, p in self.model.named_parameters()}
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not any(id(p) in known for p in parameters.values()):
            raise InputError(
                "conservation: the optimizer holds no parameter of this model: give the one that trains it"
            )
        laws, self._unchecked = _sorted(groups, parameters, known)
        self.device = device = next(iter(parameters.values())).device
        shapes = {path: tuple(p.shape) for path, p in parameters.items()}
        self.laws = laws
        self._sums = LawSums(laws, shapes, device)
        self._parameters = [parameters[path] for path in self._sums.paths]
        self._shapes = [p.shape for p in self._parameters]
        self.rule: UpdateRule = rule_of(optimizer)
        norms = any(law.group.norm_sites for law in laws)
        self._norms = NormTerms(laws, self.model, parameters) if norms else None
        # Also inside the model: autocast may be on in its forward only.
        owners = {clean_path(path): module for path, module in self.model.named_modules()}
        first = {law.group.producers[0].parameter.rpartition(".")[0] for law in laws} | {""}
        self._passes = PassPrecision([owners[path] for path in sorted(first) if path in owners], device)
        self._step_terms = StepTerms(self._sums, self._parameters, self._norms)
        self.unchecked = UncheckedSteps()
        self.precision = _lowest([p.dtype for p in self._parameters])
        self.tolerance = _TOLERANCE.get(self.precision, 0.1) if tolerance is None else tolerance
        self._off = OffDiagonal(laws, parameters, off_diagonal) if off_diagonal else None
        self._translations = self._sums_over_classes(translations, parameters, known)
        self.steps = 0
        self._accumulator = Accumulator(self._sums, laws, self._squares(), self.tolerance, self._norms)
        self._state_bytes = self._accumulator.nbytes
        self._records: list[StepRecord] = []  # steps that are not committed yet
        self._snapshots: list[Snapshot] = []  # requested after some of them
        self._summarizer = Summarizer(laws, self._sums.count, device)
        self._failure: Exception | None = None
        hooks = self._guarded(self._before), self._guarded(self._after)
        self._hooks = [optimizer.register_step_pre_hook(hooks[0]), optimizer.register_step_post_hook(hooks[1])]

    def _sums_over_classes(
        self, translations: Sequence[Translation], parameters: Mapping[str, Tensor], known: set[int]
    ) -> TranslationSums:
        """Those whose weights are in the optimizer."""
        inside = [
            translation
            for translation in translations
            if all(path is None or id(parameters[path]) in known for path in (translation.parameter, translation.bias))
        ]
        return TranslationSums(inside, parameters, self.optimizer.state, self.rule == "sgd")

    # -- at every step -------------------------------------------------------------------------------------------
    def _guarded(self, hook: Callable[..., None]) -> Callable[..., None]:
        def guarded(*args: Any) -> None:
            if self._failure is None:
                try:
                    hook(*args)
                except Exception as error:
                    self._failure = error

        return guarded

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    @torch.no_grad()
    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.laws:
            return
        for path, p, shape in zip(self._sums.paths, self._parameters, self._shapes):
            if p.shape != shape:
                raise ModelError(
                    f"conservation: {path} had shape {tuple(shape)} and now has {tuple(p.shape)}: start a new ledger"
                )
        closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
        if self._accumulator.ww is None:
            self._accumulator.ww = self._squares()
        self._step_terms.before(self.rule, optimizer, closure)

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.steps += 1
        passes = self._passes.drain()
        if self._translations.pieces:
            self._translations.after({id(p): g for g in optimizer.param_groups for p in g["params"]}, passes)
        if not self.laws:
            return
        record = replace(self._step_terms.after(self.steps, optimizer), passes=passes)
        for number, law in enumerate(self.laws if self._step_terms.unchecked is not None or record.missing else ()):
            reason = self._step_terms.unchecked or record.missing.get(number)
            if reason is not None:
                self.unchecked.add(law.name, reason)
        if self._off is not None:
            self._off.after(self._settings())
        self._records.append(record)
        if len(self._records) >= _RECORDS or len(self._records) * record.rows.nbytes >= _BYTES:
            self.commit()

    @torch.no_grad()
    def commit(self) -> None:
        """Adds the steps since the last commit to the accumulator, a few operations for many steps, and fills in snapshots."""
        records, snapshots = self._records, self._snapshots
        self._records, self._snapshots = [], []
        if records:
            states = dict(zip([record.step for record in records], self._accumulator.commit(records)))
            for snapshot in snapshots:
                if snapshot._state is None:
                    snapshot._state = states[snapshot.step]
        if snapshots:
            stacked = torch.stack([snapshot.state for snapshot in snapshots])
            rows = memoize(partial(self._rows, stacked))
            for number, snapshot in enumerate(snapshots):
                snapshot._row = partial(_item, rows, number)

    def _squares(self) -> Tensor:
        with torch.no_grad():
            return self._sums.rows({"w": [p.detach() for p in self._parameters]}, ["ww"])[0]

    def _settings(self) -> dict[str, Settings]:
        return dict(zip(self._sums.paths, self._step_terms.settings(self.optimizer)))

    # -- reading -------------------------------------------------------------------------------------------------
    def read(self) -> LedgerReport:
        """A report of all laws as of now; synchronizes with the device."""
        self._check()
        self.commit()
        accumulator = self._accumulator
        value = accumulator.value
        if self.laws:
            rows = self._squares()
            value = self._sums.fold(rows)
            accumulator.scale = torch.maximum(accumulator.scale, self._sums.size(rows))
        drift = value - accumulator.start
        residual = drift - accumulator.parts.sum(0)
        # What moved since the last step moved outside the optimizer; the next step will find it, too.
        still = (value - accumulator.value).abs() <= self.tolerance * accumulator.scale
        flagged = accumulator.flagged.masked_fill(~still & (accumulator.flagged < 0), self.steps + 1)
        columns = {
            "value": value, "start": accumulator.start, "drift": drift, "residual": residual, "scale": accumulator.scale,
            "integral": accumulator.integral.value, "worst": accumulator.worst, "worst_step": accumulator.worst_step, "flagged": flagged,
        }  # fmt: skip
        columns = {name: column.cpu() for name, column in columns.items()}
        terms = accumulator.parts.cpu()
        entries = []
        for law in self.laws:
            own = {name: column[law.span] for name, column in columns.items()}
            split = {name: terms[i, law.span] for i, name in enumerate(PARTS)}
            matrix = None if self._off is None else self._off.read(law.name)
            why = self.unchecked.why(law.name, self.steps)
            entries.append(
                LedgerEntry(
                    law.name, law.group, terms=split, off_diagonal=matrix, tolerance=self.tolerance, why=why, **own
                )
            )
        self.check_same_parameters()
        return LedgerReport(
            self.steps, tuple(entries), self._unchecked, self.precision, self.tolerance, self.rule,
            self._translations.read(self.tolerance),
        )  # fmt: skip

    def translations(self) -> list[Callable[[], TranslationEntry]]:
        """The sums over classes as of now, left on the device: calling one of the results waits for it."""
        return self._translations.snapshot(self.tolerance)

    @torch.no_grad()
    def state(self) -> Tensor:
        """Drift, scale and terms (2 + terms, channels), left on the device.

        As of the last step, or of the present weights once the ledger is closed. `summary` reduces them to a few numbers per law.
        """
        self._check()
        self.commit()
        return self._state()

    def _state(self) -> Tensor:
        return self._accumulator.state(None if self._hooks or not self.laws else self._squares())

    @torch.no_grad()
    def snapshot(self) -> Snapshot:
        """`state` as of now, filled in by the next `commit` together with those of other steps."""
        self._check()
        snapshot = Snapshot(self.steps, None if self._hooks and self._records else self._state())
        self._snapshots.append(snapshot)
        if len(self._snapshots) >= _RECORDS or len(self._snapshots) * self._state_bytes >= _BYTES:
            self.commit()
        return snapshot

    def summary(self) -> LawSummary:
        """The present state in a few numbers per law, left on the device."""
        self.check_same_parameters()
        return self._summarizer.summary(self.state())

    def _rows(self, states: Tensor) -> list[LawRow]:
        self.check_same_parameters()
        return self._summarizer.summary(states).rows()

    def check_same_parameters(self) -> None:
        """Raises an error if a parameter was replaced by another."""
        current = {clean_path(path): p for path, p in self.model.named_parameters()}
        for path, p in zip(self._sums.paths, self._parameters):
            if current.get(path) is not p:
                raise ModelError(f"conservation: {path} is no longer the parameter it was: start a new ledger")

    # -- a restart, and the end ----------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """The accumulator, to be stored in a checkpoint beside the model and the optimizer."""
        self.commit()
        return {
            "steps": self.steps,
            "laws": [f"{law.name} {law.group.law} {law.group.channels}" for law in self.laws],
            **self._accumulator.state_dict(),
            "decay": self._step_terms.state_dict(),
            "unchecked": self.unchecked.state_dict(),
            "translations": self._translations.state_dict(),
            "off_diagonal": {} if self._off is None else self._off.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the accumulator of a checkpoint. Load the model first: weights that differ show as a residual."""
        names = [(law.name, law.earlier, f"{law.group.law} {law.group.channels}") for law in self.laws]
        laws = [f"{name} {described}" for name, _, described in names]
        if list(state["laws"]) not in (laws, [f"{earlier} {described}" for _, earlier, described in names]):
            raise InputError(f"conservation: the state is about other laws ({len(state['laws'])} against {len(laws)})")
        self._records, self._snapshots, self._failure = [], [], None
        self._accumulator.load_state_dict(state)
        self.steps = int(state["steps"])
        self._step_terms.load_state_dict(state.get("decay", {}))
        self.unchecked.load_state_dict(state.get("unchecked", {}))
        self._translations.load_state_dict(state.get("translations", {}))
        if self._off is not None:
            self._off.load_state_dict(state["off_diagonal"])

    def close(self) -> None:
        """Take the hooks off the optimizer and the model. Closing twice does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._passes.close()
        if self._norms is not None:
            self._norms.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _item(rows: Callable[[], list[LawRow]], number: int) -> LawRow:
    return rows()[number]


def _sorted(
    groups: Sequence[Group], parameters: Mapping[str, Tensor], known: set[int]
) -> tuple[list[NamedLaw], tuple[Unchecked, ...]]:
    """Laws that can be kept, in order, and what has none, with the reason."""
    laws: list[NamedLaw] = []
    unchecked = []
    start = 0
    for (name, group), earlier in zip(named(groups), named_by_number(groups)):
        sites = (*group.producers, *group.consumers)
        check_wiring(sites, parameters)
        paths = [site.parameter for site in sites]
        outside = [path for path in paths if id(parameters[path]) not in known]
        if group.law == "none" or outside:
            why = group.why if group.law == "none" else f"{outside[0]} is not in the optimizer"
            unchecked.append(Unchecked(name, group.channels, why))
        else:
            laws.append(NamedLaw(name, group, start, earlier))
            start += group.channels
    return laws, tuple(unchecked)


def _lowest(dtypes: list[torch.dtype]) -> torch.dtype:
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def conservation(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    example: Batch | None = None,
    *,
    wiring: Wiring | None = None,
    output: Pick = None,
    off_diagonal: bool | int = False,
    tolerance: float | None = None,
) -> Ledger:
    """Accumulates everything that a model conserves while an optimizer trains it, and what explains its drift.

    Args:
        model: The model.
        optimizer: The optimizer that trains it.
        example: A batch as the model takes it, from which the laws are found; or pass `wiring`.
        wiring: What `excite.trace` returned.
        output: Which part of the model's return value is the output, if it returns several.
        off_diagonal: Also follow the whole matrix of each law, up to this many channels (True: 256); slower.
        tolerance: Flag a step whose residual exceeds this fraction of the squared weights. Default: 1e-12 in float64 and 1e-4 in
            float32.

    Returns:
        An open `Ledger`. Close it, or use it as a context manager, to remove its hooks.

    Raises:
        InputError: If there is neither an example nor a wiring, or the optimizer holds no parameter of the model.

    Example:
        >>> with excite.probes.conservation(model, optimizer, x) as ledger:
        ...     for _ in range(3):  # the usual training loop
        ...         optimizer.zero_grad()
        ...         model(x).square().mean().backward()
        ...         optimizer.step()
        ...     print(ledger.read())
    """
    check_norms(check_weights(check_model(model)).named_parameters())
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"conservation: expected a torch.optim.Optimizer; got {type(optimizer).__name__}")
    if wiring is None:
        if example is None:
            raise InputError("conservation: give an example batch or a wiring, to find the laws of the model")
        wiring = trace(model, example, output=output)
    if not is_flag(off_diagonal):
        off_diagonal = check_count(off_diagonal, "off_diagonal", also="True or False")
    if tolerance is not None:
        tolerance = check_number(tolerance, "tolerance", 0)
    return Ledger(model, optimizer, wiring.groups, off_diagonal, tolerance, wiring.translations)
