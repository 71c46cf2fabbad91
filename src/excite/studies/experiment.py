"""A study of one's own in a few lines: a function of settings and a seed, ways to call it, and claims about the numbers."""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from excite._core.checks import check_count
from excite.errors import InputError
from excite.studies.computed import Computed, OnProgress, Outcome
from excite.studies.figures import dot_figure
from excite.studies.study import Claim, Scale, Study, Variant, VariantResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CODE = "code"  # key of the settings that holds the digest of the function's file


def experiment(
    name: str,
    title: str,
    function: Callable[[Mapping[str, Any], int], Mapping[str, float]],
    variants: Mapping[str, Mapping[str, Any]],
    claims: Sequence[Claim],
    *,
    measures: Mapping[str, str],
    seeds: int = 5,
    asks: str = "",
) -> Study:
    """A study whose variants are calls of one function.

    Args:
        name: As in its folder and on its page: lower-case letters, digits and hyphens.
        title: Heading of the results page.
        function: Maps the settings of a variant and a seed to numbers by name. It has to stand in a module, so that worker
            processes find it, and to depend on nothing but its arguments.
        variants: Settings by name of the variant; they have to be ready for JSON.
        claims: What is claimed about the numbers. Written before the result is known.
        measures: What each number is, by its name; the headings of the table and the panels of the figure.
        seeds: How many seeds.
        asks: The question in a few words, for `excite study list`.

    Returns:
        The study. Results are stored by variant and seed, and computed again when the function's file changes.

    Raises:
        InputError: If an argument is not as described.

    Example:
        >>> def flips(settings, seed):
        ...     import random
        ...     draw = random.Random(seed)
        ...     return {"heads": sum(draw.random() < settings["p"] for _ in range(100))}
        >>> more = Claim("a biased coin shows heads more often", "not in the papers", "heads, biased minus fair",
        ...              ("fair", "biased"), lambda n: n["biased"].heads - n["fair"].heads, above=0.0)
        >>> study = experiment("coins", "Two coins", flips, {"fair": {"p": 0.5}, "biased": {"p": 0.8}}, [more],
        ...                    measures={"heads": "heads of 100"})
    """
    if not callable(function):
        raise InputError(f"function: expected a function of settings and a seed; got {function!r}")
    if not measures or not variants:
        raise InputError("expected at least one variant and one measure")
    code = _digest(function)
    ways = [Variant(key, {**settings, **({_CODE: code} if code else {})}) for key, settings in variants.items()]
    scale = Scale(name="quick", seeds=check_count(seeds, "seeds"), words=f"{seeds} seeds")

    def draw(
        study: Study, scale: Any, details: Mapping[str, list[Any]], numbers: Sequence[VariantResult]
    ) -> dict[str, tuple[str, Figure]]:
        return {"figure": (study.title, dot_figure(numbers, study.title, measures))}

    method = Computed(
        _Call(function, tuple(measures)), {key: (label, "{:.4g}") for key, label in measures.items()}, draw,
        "One row per variant, one dot per seed; the bar is the mean.", "Means over seeds, and the range.",
    )  # fmt: skip
    return Study(
        name, title, "not in the papers", asks or title, method, {"quick": scale}, lambda _: list(ways), lambda _: list(claims),
        asks=asks or title,
    )  # fmt: skip


@dataclass(frozen=True)
class _Call:
    """The function, with its numbers checked."""

    function: Callable[[Mapping[str, Any], int], Mapping[str, float]]
    measures: tuple[str, ...]

    def __call__(self, settings: Mapping[str, Any], seed: int, on_progress: OnProgress) -> Outcome:
        passed = {key: value for key, value in settings.items() if key != _CODE}
        result = self.function(passed, seed)
        if not isinstance(result, Mapping) or set(result) != set(self.measures):
            got = ", ".join(map(str, result)) if isinstance(result, Mapping) else type(result).__name__
            raise InputError(f"the function returned {got}; expected the numbers {', '.join(self.measures)} by name")
        try:
            values = {key: float(result[key]) for key in self.measures}
        except (TypeError, ValueError) as error:
            raise InputError(f"the function returned something that is no number: {error}") from error
        flags = tuple(f"{key} is not finite" for key, value in values.items() if not math.isfinite(value))
        return Outcome(values, None, flags)


def _digest(function: Callable[..., Any]) -> str:
    """A digest of the file of a function; empty where there is none."""
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    if file is None or not Path(file).is_file():
        return ""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
