"""A ledger of what training conserves: at every optimizer step, how far each law moved and what moved it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.calls import Batch, Pick
from excite._core.checks import check_count, check_model, check_norms, check_number, check_weights, is_flag
from excite._core.intercept.affine import clean_path
from excite._core.wrappers import unwrap
from excite.errors import InputError, ModelError
from excite.probes.conserved.accumulator import Books
from excite.probes.conserved.hyperparameters import Settings
from excite.probes.conserved.laws import LawSums, NamedLaw, check_wiring, named
from excite.probes.conserved.norm_terms import NormTerms
from excite.probes.conserved.off_diagonal import OffDiagonal
from excite.probes.conserved.passes import PassPrecision
from excite.probes.conserved.report import Entry, Reading, Unchecked
from excite.probes.conserved.step_terms import Line, Stages
from excite.probes.conserved.summary import Digest, Digester
from excite.probes.conserved.unchecked import UncheckedSteps
from excite.probes.conserved.update_terms import PARTS, Rule, rule_of
from excite.wiring.groups import Group
from excite.wiring.tracing import Wiring, trace

_LINES, _BYTES = 64, 1 << 25  # steps that wait to be booked together, and the memory they may take
_TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4}  # a rest beyond this share of the squared weights is flagged


class Mark:
    """What the books say after one step; `read` has the step booked if it is not yet."""

    def __init__(self, enter: Callable[[], None]):
        self._enter = enter
        self.found: Tensor | None = None

    def read(self) -> Tensor:
        """(2 + parts, channels): drift, scale and parts."""
        if self.found is None:
            self._enter()
        if self.found is None:
            raise InputError("conservation: the books were replaced by those of a checkpoint")
        return self.found


class Ledger:
    """Books of the conserved quantities of a model. Use `excite.probes.conservation(...)` to make one.

    What goes wrong at a step is not raised into training: the books end there, and reading them raises it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[Group],
        off_diagonal: bool | int = False,
        tolerance: float | None = None,
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
        self.rule: Rule = rule_of(optimizer)
        norms = any(law.group.norm_sites for law in laws)
        self._norms = NormTerms(laws, self.model, parameters) if norms else None
        # Also inside the model: autocast may be on in its forward only.
        owners = {clean_path(path): module for path, module in self.model.named_modules()}
        first = {law.group.producers[0].parameter.rpartition(".")[0] for law in laws} | {""}
        self._passes = PassPrecision([owners[path] for path in sorted(first) if path in owners], device)
        self._stages = Stages(self._sums, self._parameters, self._norms)
        self.unchecked = UncheckedSteps()
        self.precision = _lowest([p.dtype for p in self._parameters])
        self.tolerance = _TOLERANCE.get(self.precision, 0.1) if tolerance is None else tolerance
        self._off = OffDiagonal(laws, parameters, off_diagonal) if off_diagonal else None
        self.steps = 0
        self._books = Books(self._sums, laws, self._squares(), self.tolerance, self._norms)
        self._lines: list[Line] = []  # steps that are not in the books yet
        self._marks: list[tuple[int, Mark]] = []  # after which of them somebody wants to know what is in the books
        self._digester = Digester(laws, self._sums.count, device)
        self._failure: Exception | None = None
        hooks = self._kept(self._before), self._kept(self._after)
        self._hooks = [optimizer.register_step_pre_hook(hooks[0]), optimizer.register_step_post_hook(hooks[1])]

    # -- at every step -------------------------------------------------------------------------------------------
    def _kept(self, hook: Callable[..., None]) -> Callable[..., None]:
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
        if self._books.ww is None:
            self._books.ww = self._squares()
        self._stages.before(self.rule, optimizer, closure)

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.steps += 1
        if not self.laws:
            return
        line = replace(self._stages.after(self.steps, optimizer), passes=self._passes.take())
        for number, law in enumerate(self.laws if self._stages.unchecked is not None or line.missing else ()):
            reason = self._stages.unchecked or line.missing.get(number)
            if reason is not None:
                self.unchecked.add(law.name, reason)
        if self._off is not None:
            self._off.after(self._settings())
        self._lines.append(line)
        if len(self._lines) >= _LINES or len(self._lines) * line.rows.nbytes >= _BYTES:
            self._enter()

    @torch.no_grad()
    def _enter(self) -> None:
        """Put what waits into the books: a few operations for many steps."""
        lines, marks = self._lines, self._marks
        self._lines, self._marks = [], []
        if not lines:
            return
        found = dict(zip([line.step for line in lines], self._books.enter(lines)))
        for step, mark in marks:
            mark.found = found[step]

    def _squares(self) -> Tensor:
        with torch.no_grad():
            return self._sums.rows({"w": [p.detach() for p in self._parameters]}, ["ww"])[0]

    def _settings(self) -> dict[str, Settings]:
        return dict(zip(self._sums.paths, self._stages.settings(self.optimizer)))

    # -- reading -------------------------------------------------------------------------------------------------
    def read(self) -> Reading:
        """What is in the books now; synchronizes with the device."""
        self._check()
        self._enter()
        books = self._books
        value = books.value
        if self.laws:
            rows = self._squares()
            value = self._sums.fold(rows)
            books.scale = torch.maximum(books.scale, self._sums.size(rows))
        drift = value - books.start
        rest = drift - books.parts.sum(0)
        # What moved since the last step moved outside the optimizer; the next step will find it, too.
        still = (value - books.value).abs() <= self.tolerance * books.scale
        flagged = books.flagged.masked_fill(~still & (books.flagged < 0), self.steps + 1)
        columns = {
            "value": value, "start": books.start, "drift": drift, "rest": rest, "scale": books.scale,
            "worst": books.worst, "worst_step": books.worst_step, "flagged": flagged,
        }  # fmt: skip
        columns = {name: column.cpu() for name, column in columns.items()}
        parts = books.parts.cpu()
        entries = []
        for law in self.laws:
            mine = {name: column[law.span] for name, column in columns.items()}
            split = {name: parts[i, law.span] for i, name in enumerate(PARTS)}
            matrix = None if self._off is None else self._off.read(law.name)
            why = self.unchecked.why(law.name, self.steps)
            entries.append(
                Entry(law.name, law.group, parts=split, off_diagonal=matrix, tolerance=self.tolerance, why=why, **mine)
            )
        self.check_same_parameters()
        return Reading(self.steps, tuple(entries), self._unchecked, self.precision, self.tolerance, self.rule)

    @torch.no_grad()
    def books(self) -> Tensor:
        """Drift, scale and parts (2 + parts, channels), left on the device: as booked by the last step, or once the ledger is
        closed as the weights are now. `digest` makes a few numbers per law out of them."""
        self._check()
        self._enter()
        return self._books.now(None if self._hooks or not self.laws else self._squares())

    def mark(self) -> Mark:
        """The same as of now, for later: computed together with those of other steps."""
        self._check()
        mark = Mark(self._enter)
        if self._hooks and self._lines:
            self._marks.append((self.steps, mark))
        else:
            mark.found = self.books()
        return mark

    def digest(self, books: Tensor | None = None) -> Digest:
        """Of these books, or of those of several moments stacked; by default of what they are now."""
        self.check_same_parameters()
        return self._digester.digest(self.books() if books is None else books)

    def check_same_parameters(self) -> None:
        """Refuse to go on where a parameter was replaced by another."""
        current = {clean_path(path): p for path, p in self.model.named_parameters()}
        for path, p in zip(self._sums.paths, self._parameters):
            if current.get(path) is not p:
                raise ModelError(f"conservation: {path} is no longer the parameter it was: start a new ledger")

    # -- a restart, and the end ----------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """The books, to be kept in a checkpoint beside the model and the optimizer."""
        self._enter()
        return {
            "steps": self.steps,
            "laws": [f"{law.name} {law.group.law} {law.group.channels}" for law in self.laws],
            **self._books.state_dict(),
            "decay": self._stages.state_dict(),
            "unchecked": self.unchecked.state_dict(),
            "off_diagonal": {} if self._off is None else self._off.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the books of a checkpoint end. Load the model first: weights that differ show as a rest."""
        laws = [f"{law.name} {law.group.law} {law.group.channels}" for law in self.laws]
        if list(state["laws"]) != laws:
            raise InputError(f"conservation: the books are about other laws ({len(state['laws'])} against {len(laws)})")
        self._lines, self._marks, self._failure = [], [], None
        self._books.load_state_dict(state)
        self.steps = int(state["steps"])
        self._stages.load_state_dict(state.get("decay", {}))
        self.unchecked.load_state_dict(state.get("unchecked", {}))
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _sorted(
    groups: Sequence[Group], parameters: Mapping[str, Tensor], known: set[int]
) -> tuple[list[NamedLaw], tuple[Unchecked, ...]]:
    """Laws that can be kept, in order, and what has none, with the reason."""
    laws: list[NamedLaw] = []
    unchecked = []
    start = 0
    for name, group in named(groups):
        sites = (*group.producers, *group.consumers)
        check_wiring(sites, parameters)
        paths = [site.parameter for site in sites]
        outside = [path for path in paths if id(parameters[path]) not in known]
        if group.law == "none" or outside:
            why = group.why if group.law == "none" else f"{outside[0]} is not in the optimizer"
            unchecked.append(Unchecked(name, group.channels, why))
        else:
            laws.append(NamedLaw(name, group, start))
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
    """Keep the books of everything that `model` conserves while `optimizer` trains it.

        with excite.probes.conservation(model, optimizer, x) as ledger:
            ...                              # your usual training loop
            print(ledger.read())

    Args:
        example: a batch as the model takes it, to find its laws; or `wiring`, from `excite.trace`.
        output: which output of a model that returns several; see `excite.trace`.
        off_diagonal: also keep the whole matrix of laws, up to this many channels (True: 256); slower.
        tolerance: flag a step whose rest exceeds this share of the squared weights; by default 1e-12 in float64 and
            1e-4 in float32.
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
    return Ledger(model, optimizer, wiring.groups, off_diagonal, tolerance)
