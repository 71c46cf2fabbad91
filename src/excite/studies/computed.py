"""Studies whose variants are functions: settings and a seed in, numbers out. Small experiments that need no run folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from excite._core.files import write_json, writing
from excite.data import load
from excite.errors import RunError
from excite.jobs.job import Tell, Work
from excite.runs.environment import environment
from excite.studies.study import Scale, Study, Variant, VariantResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class StepsScale(Scale):
    steps: int


OnProgress = Callable[[float], None]  # called with the fraction that is done


@dataclass(frozen=True)
class Outcome:
    """What one variant gave for one seed. `detail` is what figures need, ready for JSON."""

    values: Mapping[str, float]
    detail: Any = None
    flags: tuple[str, ...] = ()


# (settings of the variant, seed, progress) -> outcome; a function of a module, so that worker processes find it
Compute = Callable[[Mapping[str, Any], int, OnProgress], Outcome]
# The same for several pairs of settings and seed at once, on a device; outcomes in their order.
ComputeAll = Callable[[Sequence[tuple[Mapping[str, Any], int]], str, OnProgress], Sequence[Outcome]]
# (settings, seed, device, folder for what is kept between calls, progress) -> outcome
ComputeLong = Callable[[Mapping[str, Any], int, str, Path, OnProgress], Outcome]
Draw = Callable[[Study, Any, Mapping[str, list[Any]], Sequence[VariantResult]], "dict[str, tuple[str, Figure]]"]


@dataclass(frozen=True)
class Jointly:
    """Variants and seeds that are computed at once, such as networks of one ensemble."""

    compute: ComputeAll


@dataclass(frozen=True)
class Resumable:
    """Variants that take long: they keep what they have in their folder, and go on from there."""

    compute: ComputeLong


@dataclass(frozen=True)
class Stored:
    """Its folder holds result.json and environment.json once it is done."""

    arm: str
    seed: int
    folder: Path
    settings: Mapping[str, Any]

    def finished(self) -> bool:
        try:
            stored = json.loads((self.folder / "result.json").read_text())
            return bool(stored["settings"] == json.loads(json.dumps(dict(self.settings))))
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def write(self, found: Outcome) -> None:
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "environment.json", environment())
        write_json(
            self.folder / "result.json",
            {
                "settings": dict(self.settings),
                "values": dict(found.values),
                "detail": found.detail,
                "flags": found.flags,
            },
        )


@dataclass(frozen=True)
class Computation(Stored):
    compute: Compute

    def perform(self, tell: Tell) -> None:
        name = self.folder.name
        self.write(self.compute(self.settings, self.seed, lambda share: tell(name, "computing", share)))
        tell(name, "done", 1.0)


@dataclass(frozen=True)
class JointComputation(Stored):
    compute: ComputeAll
    device: str

    def perform(self, tell: Tell) -> None:
        self.perform_with([], tell)

    def perform_with(self, others: Sequence[JointComputation], tell: Tell) -> None:
        parts = [self, *others]

        def on_progress(share: float) -> None:
            for part in parts:
                tell(part.folder.name, "computing", share)

        outcomes = self.compute([(part.settings, part.seed) for part in parts], self.device, on_progress)
        for part, found in zip(parts, outcomes, strict=True):
            part.write(found)
            tell(part.folder.name, "done", 1.0)


@dataclass(frozen=True)
class LongComputation(Stored):
    compute: ComputeLong
    device: str

    def perform(self, tell: Tell) -> None:
        name = self.folder.name
        on_progress = partial(tell, name, "computing")
        self.write(self.compute(self.settings, self.seed, self.device, self.folder, on_progress))
        tell(name, "done", 1.0)


@dataclass(frozen=True)
class Computed:
    """The method of such a study."""

    compute: Compute | Jointly | Resumable
    columns: Mapping[str, tuple[str, str]]
    draw: Draw
    below_figure: str
    words: str  # below the table
    settings: tuple[str, ...] = ()
    data: tuple[str, ...] = field(default=())

    def work(self, study: str, variant: Variant, scale: Any, seed: int, folder: Path, device: str) -> Work:
        if isinstance(self.compute, Jointly):
            return JointComputation(variant.name, seed, folder, variant.config, self.compute.compute, device)
        if isinstance(self.compute, Resumable):
            return LongComputation(variant.name, seed, folder, variant.config, self.compute.compute, device)
        return Computation(variant.name, seed, folder, variant.config, self.compute)

    def check(self, work: Sequence[Work]) -> None:
        for name in self.data:
            load(name, classes=(0, 1), train=2, test=2)  # says how to fetch what is not there

    def read(self, work: Work) -> tuple[VariantResult, Any]:
        try:
            stored = json.loads((work.folder / "result.json").read_text())
            values = {name: float("nan") if value is None else float(value) for name, value in stored["values"].items()}
            return VariantResult(work.arm, work.seed, values, tuple(stored["flags"])), stored["detail"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{work.folder / 'result.json'} is damaged ({error!r}): delete it and start again"
            ) from error

    def figures(
        self, study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
    ) -> dict[str, tuple[str, Figure]]:
        return self.draw(study, scale, details, numbers)

    def below_table(self, scale: Any) -> str:
        return self.words
