"""A study: variants of an experiment, the scales it runs at, and the claims that comparing the variants settles."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from excite._core.compatibility import renamed_attribute
from excite.errors import InputError
from excite.jobs.job import Job
from excite.studies.papers import Place, parse_place

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Variant:
    """One way of running the experiment of a study.

    Args:
        name: As it stands in tables and figures.
        config: Its settings; for a training those of a `TrainConfig` without seed and device.
        extra: Whether it is left out unless all variants are requested: not a curve of the paper's figure.

    Example:
        >>> Variant("radius 0.02", {"excitation": {"radius": 0.02}}).extra
        False
    """

    name: str
    config: Mapping[str, Any]
    extra: bool = False

    @property
    def slug(self) -> str:
        """The name as part of a folder's name."""
        return re.sub(r"[^\w.]+", "-", self.name)


@dataclass(frozen=True)
class VariantResult:
    """The numbers of one variant for one seed.

    Args:
        variant: Name of the variant.
        seed: The seed.
        values: Numbers by name, also readable as attributes: ``result.gap``.
        flags: Reasons not to trust the numbers; empty if there are none.
        by_chance: Whether the network decides hardly better than by chance, so that its other numbers mean little.
        resamples: Where all seeds and variants were measured on the same images: some of the values again, each on images drawn with
            replacement, the same draws everywhere. Intervals then cover other images, not only other seeds.
        curves: Lines of the figures, by name, where they are to be drawn from numbers.json alone.
        settings: `excite.studies.earlier.fingerprint` of the job; empty if it is not known.

    Example:
        >>> VariantResult("plain", 0, {"gap": 0.3}).gap
        0.3
    """

    variant: str
    seed: int
    values: Mapping[str, float] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    by_chance: bool = False
    resamples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    settings: str = ""

    arm = renamed_attribute("arm", "variant")

    def __getattr__(self, name: str) -> float:
        values: Mapping[str, float] = self.__dict__.get("values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"no number {name!r}; expected one of {', '.join(values)}")

    def resampled(self, at: int) -> VariantResult:
        """The result on the images of one resample."""
        values = {**self.values, **{name: drawn[at] for name, drawn in self.resamples.items()}}
        return replace(self, values=values, resamples={})

    def plain(self) -> dict[str, Any]:
        """The entry of numbers.json: values that are not finite are None; those of resamples and curves have four digits."""
        values = {name: value if math.isfinite(value) else None for name, value in self.values.items()}
        more: dict[str, Any] = {"by_chance": True} if self.by_chance else {}
        for name in ("resamples", "curves"):
            if lines := getattr(self, name):
                more[name] = {key: _four_digits(line) for key, line in lines.items()}
        if self.settings:
            more["settings"] = self.settings
        return {"arm": self.variant, "seed": self.seed, **values, "flags": self.flags, **more}


def _four_digits(values: Sequence[float]) -> list[float | None]:
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]


Strength = Literal["as said", "threshold", "weaker", "stronger", "ours"]
STRENGTHS: Mapping[Strength, str] = {
    "as said": "tested as said",
    "threshold": "the paper gives no number: the threshold is ours",
    "weaker": "tested in a weaker form: the paper says more",
    "stronger": "tested in a stronger form: the paper says less",
    "ours": "the paper does not claim this: the claim is ours",
}


@dataclass(frozen=True)
class Claim:
    """A sentence, and a number per seed that has to lie above `above`, below `below`, or within ±`within`, for it to hold.

    Args:
        text: The sentence.
        source: Paper and figure or section, or "not in the papers".
        measure: What the effect is, in words.
        variants: Names of the variants that are compared.
        effect: Maps the results of one seed, by variant, to the number. Variants are so compared in pairs: the same
            initial weights and the same order of the data wherever they agree in shape. Several numbers are rungs of a
            ladder: each has to lie on the claimed side.
        above: The claim holds if the effect lies above this number.
        below: The claim holds if the effect lies below this number.
        within: The claim is one of no difference: it holds if the whole interval of the effect lies within ± this number, which has
            to be chosen before the result is known.
        kind: "effect" for a claim on the mean over seeds, judged by its interval; "universal" for a theorem or bound, which fails on
            one counterexample; "exact" for an identity, which holds up to rounding on every seed.
        premise: What the claim assumes, on the results of one seed; seeds on which it is not met are left out.
        quote: The sentence of the paper, word by word; empty where the paper has none.
        strength: How what is tested compares with the quote: "as said"; "threshold", where the paper gives no number; "weaker" or
            "stronger"; "ours", where the paper does not claim it. Without a quote a claim is ours.

    Raises:
        InputError: If not exactly one of `above`, `below` and `within` is given, or `kind` or `strength` is none of their words.

    Example:
        >>> claim = Claim("excitation shrinks the gap", "figure 1", "gap", ("plain", "excited"),
        ...               lambda n: n["excited"].gap - n["plain"].gap, below=0.0)
        >>> plain, excited = VariantResult("plain", 0, {"gap": 0.5}), VariantResult("excited", 0, {"gap": 0.25})
        >>> claim.effect({"plain": plain, "excited": excited})
        -0.25
    """

    text: str
    source: str
    measure: str
    variants: tuple[str, ...]
    effect: Callable[[Mapping[str, VariantResult]], float | Sequence[float]]
    above: float | None = None
    below: float | None = None
    within: float | None = None
    kind: Literal["effect", "exact", "universal"] = "effect"
    premise: Callable[[Mapping[str, VariantResult]], bool] | None = None
    quote: str = ""
    strength: Strength = "as said"

    arms = renamed_attribute("arms", "variants")

    def quoting(self, quote: str, strength: Strength = "as said") -> Claim:
        """The claim with the paper's sentence beside it.

        Args:
            quote: The sentence as printed.
            strength: How what is tested compares with it, one of `STRENGTHS`.

        Returns:
            A copy of the claim.
        """
        return replace(self, quote=quote, strength=strength)

    @property
    def ours(self) -> bool:
        """Whether the paper does not claim it."""
        return not self.quote or self.strength == "ours"

    @property
    def reading(self) -> str:
        """How what is tested compares with the paper's words, in words."""
        return STRENGTHS["ours" if self.ours else self.strength]

    def __post_init__(self) -> None:
        if self.strength not in STRENGTHS:
            expected = ", ".join(map(repr, STRENGTHS))
            raise InputError(f"claim {self.text!r}: strength: expected one of {expected}; got {self.strength!r}")
        limits = [name for name in ("above", "below", "within") if getattr(self, name) is not None]
        if len(limits) != 1:
            got = " and ".join(limits) or "none of them"
            raise InputError(f"claim {self.text!r}: expected one of above, below and within; got {got}")
        if self.kind not in ("effect", "exact", "universal") or (self.kind != "effect" and limits == ["within"]):
            raise InputError(
                f"claim {self.text!r}: expected kind 'effect', 'exact' or 'universal', the latter two with above or below; "
                f"got {self.kind!r} with {limits[0]}"
            )


def from_seed(first: int) -> Callable[[Mapping[str, VariantResult]], bool]:
    """The premise of a claim that the seeds before `first` suggested: only later ones decide it."""
    return lambda results: all(result.seed >= first for result in results.values())


def gap_claim(text: str, source: str, variant: str, than: str, *, wider: bool = False) -> Claim:
    """The claim that the gap between training and test curves is smaller in `variant` than in the variant `than`, or `wider`."""
    bounds: dict[str, Any] = {"above": 0.0} if wider else {"below": 0.0}
    measure = f"gap of the curves, {variant} minus {than}"
    return Claim(text, source, measure, (than, variant), lambda n: n[variant].gap - n[than].gap, **bounds)


@dataclass(frozen=True)
class Ladder:
    """Variants from the simplest task to the most complex, and claims that a number grows along them."""

    variants: tuple[str, ...]
    rung: str  # what distinguishes one from the next, in words

    def each(self, text: str, source: str, name: str, description: str) -> Claim:
        """The number `name` grows from every variant to the next: rung by rung, each has to grow."""

        def effect(n: Mapping[str, VariantResult]) -> list[float]:
            logs = [math.log10(getattr(n[variant], name)) for variant in self.variants]
            return [after - before for before, after in pairwise(logs)]

        measure = f"{description}, log10 of the smallest ratio of a {self.rung} to the next lower one"
        return Claim(text, source, measure, self.variants, effect, above=0.0)

    def ends(self, text: str, source: str, name: str, description: str) -> Claim:
        """The number `name` is larger in the last variant than in the first."""
        low, high = self.variants[0], self.variants[-1]

        def effect(n: Mapping[str, VariantResult]) -> float:
            return math.log10(getattr(n[high], name) / getattr(n[low], name))

        return Claim(
            text, source, f"{description}, log10 of the ratio of {high} to {low}", (low, high), effect, above=0.0
        )


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The size of a study. Subclasses add what their experiment needs.

    Args:
        name: "quick", "paper", ...
        seeds: Number of seeds.
        words: What distinguishes the scale, for the results page.
        every_variant: Whether extra variants belong to it without being requested.
        own_page: Whether its results page is NAME-SCALE.md, beside the study's NAME.md of another scale.

    Example:
        >>> Scale(name="quick", seeds=3, words="fewer images").seeds
        3
    """

    name: str
    seeds: int
    words: str
    every_variant: bool = False
    own_page: bool = False

    def plain(self) -> dict[str, Any]:
        """The entry of numbers.json."""
        settings = asdict(self)
        return {"every_arm" if name == "every_variant" else name: value for name, value in settings.items()}


class Method(Protocol):
    """How the variants of a study become numbers, and numbers a page."""

    @property
    def data(self) -> tuple[str, ...]:
        """Names of the data sets to fetch first."""

    @property
    def columns(self) -> Mapping[str, tuple[str, str]]:
        """Heading and format of each column of the table, by name of the number."""

    @property
    def below_figure(self) -> str:
        """Text below the first figure."""

    @property
    def settings(self) -> tuple[str, ...]:
        """Items of the page's section on settings."""

    def job(self, study: str, variant: Variant, scale: Any, seed: int, folder: Path, device: str) -> Job:
        """The job of one variant and seed."""

    def check(self, jobs: Sequence[Job]) -> None:
        """Raises before anything starts if data are missing."""

    def read(self, job: Job) -> tuple[VariantResult, Any]:
        """The numbers of a finished job, and what figures need beyond them."""

    def figures(
        self, study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
    ) -> dict[str, tuple[str, Figure]]:
        """A sentence and the figure, by short name; the first is the study's own. `details`: by variant, one per seed."""

    def below_table(self, scale: Any) -> str:
        """Text below the table."""


@dataclass(frozen=True)
class Study:
    """An experiment with its claims.

    Args:
        name: As on the command line: ``excite study run NAME``.
        title: Heading of the results page.
        figure: Which figure of which paper it remakes.
        task: The data and networks, in a few words.
        method: How variants become numbers, and numbers a page.
        scales: The scales by name.
        variants: Function from a scale to the variants.
        claims: Function from a scale to the claims.
        notes: Differences from the paper, for the results page.
        asks: The question in a few words, for `excite study list`.
        sources: Figures, statements and sections of the papers that it remakes or tests: "persistency:figure 6".
        seconds: CPU seconds of a scale on the machine of `excite.studies.overview.REFERENCE`, by name of the scale.
        origin: Path of the file of a user's own study; empty for one of Excite or of an installed package.

    Example:
        >>> study = excite.studies.STUDIES["margin-losses"]
        >>> list(study.scales), len(study.claims(study.scales["quick"])) > 0
        (['quick', 'paper'], True)
    """

    name: str
    title: str
    figure: str
    task: str
    method: Method
    scales: Mapping[str, Any]
    variants: Callable[[Any], list[Variant]]
    claims: Callable[[Any], list[Claim]]
    notes: tuple[str, ...] = ()
    asks: str = ""
    sources: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    origin: str = ""

    arms = renamed_attribute("arms", "variants")

    @property
    def places(self) -> tuple[Place, ...]:
        """Its sources as places in papers."""
        return tuple(parse_place(source) for source in self.sources)
