"""Where the batch lies at every site of a model, also where the samples of a batch look alike.

The doubled pass is compared with the clean one, site by site. Samples that are equal (a warm-up with zeros, a layer whose
units are all off) say nothing about folded axes: several layouts fit. Then both passes are repeated with *marks*: random
numbers added to the input of every chosen layer, for each sample its own, and the same for both halves of the doubled
batch. Laid out as the samples are, they give twice what they give in the clean pass, at all later sites and at the output;
otherwise they mix samples, and something does not fit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from itertools import takewhile

import torch
from torch import Tensor

from excite._core.intercept.affine import AffineCall, Names
from excite._core.layout import Layout, closest, possible_layouts
from excite._core.replay.passes import Pass, Tape, another_path
from excite.errors import ModelError

Run = Callable[[Pass, int], Tensor]  # (pass, copies) -> outputs of the batch, so many times in a row, (copies · B, ...)
_MAX_PASSES = 64  # doubled passes with marks


class MarkedPass(Pass):
    """Repeats a tape with marks, on one copy of the batch or on two.

    On one copy it makes the marks, by site, and keeps the signals. On two copies, given that pass, it lists the layouts that
    fit each site and puts the marks in as `choice` has it, or else as the first that fits. `misfit` is the first site where
    none did.
    """

    def __init__(
        self,
        names: Names,
        tape: Tape,
        chosen: Collection[str],
        single: MarkedPass | None = None,
        choice: Mapping[int, Layout] | None = None,
    ):
        super().__init__(names, tape, copies=1 if single is None else 2)
        self._chosen, self._single, self._choice = chosen, single, choice or {}
        self.signals: list[Tensor] = []
        self.marks: dict[int, Tensor] = {}
        self.misfit: int | None = None

    def site(self, tensor: Tensor, what: str) -> Layout | None:
        at = self._site
        self._site += 1
        if at >= len(self.tape.shapes) or self.tape.shapes[at][0] != what:
            raise another_path(f"it came to {what}")
        if self._single is None:
            self.signals.append(tensor.detach())
            return Layout()
        clean = self._single.signals[at]
        possible = possible_layouts(clean.shape, tensor.shape, self.tape.batch)
        fitting = closest(possible, clean, tensor)
        if self.misfit is None and possible and self._choice.get(at, fitting[0] if fitting else None) not in fitting:
            self.misfit = at
        self.fitting.append(fitting)
        return self._choice.get(at) or next(iter(fitting or possible), None)

    def affine(self, call: AffineCall) -> Tensor:
        return call.run(self.at_signal(call.name, call.input), frozen=True)

    def at_signal(self, name: str, signal: Tensor) -> Tensor:
        if name not in self._chosen or not signal.is_floating_point():
            return signal
        at, layout = self._site, self.site(signal, name)
        random_mark = self._mark_at(at, signal)
        return signal + (random_mark if self.copies == 1 or layout is None else layout.join(random_mark, random_mark))

    def _mark_at(self, at: int, input: Tensor) -> Tensor:
        """As large as the signal, or 1 where that is zero."""
        if self._single is not None:
            return self._single.marks[at]
        generator = torch.Generator(input.device).manual_seed(at)
        random_mark = torch.randn(input.shape, generator=generator, dtype=input.dtype, device=input.device)
        size = input.detach().square().mean().sqrt()
        self.marks[at] = random_mark * torch.where(size > 0, size, 1)
        return self.marks[at]


def resolve_layouts(
    run: Run,
    names: Names,
    tape: Tape,
    chosen: Collection[str],
    fitting: list[list[Layout]],
    any_process: Callable[[bool], bool] = bool,
) -> tuple[list[Layout | None], bool]:
    """The layouts by site, and whether they are certain; `fitting` are the ones that fit without marks.

    Not certain: several choices give the same outputs (what happens at a site has no influence on them), or none does; the
    latter is warned of. `run` runs the model without gradients. Where several processes make its passes together,
    `any_process` says whether something holds in any of them: all make as many passes.
    """
    best = [layouts[0] if layouts else None for layouts in fitting]
    if not any_process(any(len(layouts) > 1 for layouts in fitting)):
        return best, True
    try:
        choices = _consistent(run, names, tape, chosen, fitting, any_process)
    except ModelError:  # with marks the model takes another path
        choices = []
    if not choices:
        unclear = dict.fromkeys(
            description for (description, _), layouts in zip(tape.shapes, fitting) if len(layouts) > 1
        )
        warnings.warn(
            f"cannot tell how samples lie in the input of {', '.join(unclear)}: all samples of the batch are equal there; "
            "start with a batch of different samples",
            stacklevel=2,
        )
    return (choices or [best])[0], len(choices) == 1


def _consistent(
    run: Run,
    names: Names,
    tape: Tape,
    chosen: Collection[str],
    fitting: list[list[Layout]],
    any_process: Callable[[bool], bool],
) -> list[list[Layout | None]]:
    """All choices of layouts under which marks give in the doubled pass twice what they give in the clean one."""
    single = MarkedPass(names, tape, chosen)
    output = run(single, 1)
    # What comes after an unclear site may fit only because masks were laid out in the same wrong way.
    clear = takewhile(lambda item: len(item[1]) <= 1, enumerate(fitting))
    waiting: list[dict[int, Layout]] = [{at: layouts[0] for at, layouts in clear if layouts}]
    assignments: list[list[Layout | None]] = []
    for _ in range(_MAX_PASSES):
        if not any_process(bool(waiting)):
            return assignments
        choice = waiting.pop() if waiting else {}
        double = MarkedPass(names, tape, chosen, single, choice)
        twice = run(double, 2)
        unclear = next((at for at, layouts in enumerate(double.fitting) if len(layouts) > 1 and at not in choice), None)
        if double.misfit is not None and (unclear is None or double.misfit < unclear):
            continue
        if unclear is not None:
            waiting += [{**choice, unclear: layout} for layout in reversed(double.fitting[unclear])]
        elif closest([Layout()], output, twice):
            assignments.append(
                [choice.get(at, layouts[0] if layouts else None) for at, layouts in enumerate(double.fitting)]
            )
    return []
