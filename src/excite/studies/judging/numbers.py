"""numbers.json: the numbers of a study by variant and seed, from which its verdicts can be found again."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from excite.errors import InputError
from excite.runs.folder import check_folder_name
from excite.studies.find import find_study
from excite.studies.judging.verdicts import Verdict, judge_all
from excite.studies.overview import RUNS
from excite.studies.study import Claim, Study, VariantResult

PUBLISHED = Path("docs/results")  # of a checkout: NAME.json beside NAME.md
_RESERVED = ("arm", "seed", "flags", "by_chance", "resamples", "curves", "settings")


@dataclass(frozen=True)
class JudgedAgain:
    """Verdicts found again from stored numbers.

    Args:
        study: The study.
        scale: The scale of the numbers.
        file: Where the numbers stand.
        verdicts: The verdicts, by the claims and rules of this version of Excite.
        changes: For each claim whose stored verdict is another one: its text, the stored word and the new one.
    """

    study: Study
    scale: str
    file: Path
    verdicts: tuple[Verdict, ...]
    changes: tuple[tuple[str, str, str], ...] = ()

    def __str__(self) -> str:
        changed = [f"changed: {text} ({before} as stored, now {after})" for text, before, after in self.changes]
        lines = [line for verdict in self.verdicts for line in (str(verdict), f"    {_quoted(verdict.claim)}")]
        return "\n".join([*lines, *(changed or ["all verdicts are as stored"])])


def _quoted(claim: Claim) -> str:
    """The sentence of the paper, and how the tested statement compares with it."""
    return f"the paper: “{claim.quote}”; {claim.reading}" if claim.quote else claim.reading


def judge_again(
    study: str | os.PathLike[str] | Study, file: str | os.PathLike[str] | None = None, scale: str | None = None
) -> JudgedAgain:
    """Finds the verdicts of a study again from its numbers, without running anything.

    Args:
        study: The study, as for `run`.
        file: A numbers.json, or its folder. By default that of `runs/studies`, at the largest scale that was run, else the
            published `docs/results/NAME.json` of a checkout.
        scale: With the default file: which scale in `runs/studies`.

    Returns:
        The verdicts, and which of them differ from the stored ones.

    Raises:
        InputError: If there are no numbers, or they are of another study or damaged.

    Example:
        >>> judged = judge_again("boundaries", "runs/studies/boundaries-quick")  # doctest: +SKIP
        >>> judged.verdicts[0].word  # doctest: +SKIP
        'holds'
    """
    result = find_study(study)
    path = _find_file(result, file, scale)
    stored, numbers = _read_numbers(result, path)
    verdicts = judge_all(result.claims(result.scales[stored["scale"]]), numbers)
    before = {(v["text"], v["measure"]): str(v["verdict"]) for v in stored["verdicts"]}
    changes = [
        (v.claim.text, before[key], v.word)
        for v in verdicts
        if (key := (v.claim.text, v.claim.measure)) in before and before[key] != v.word
    ]
    return JudgedAgain(result, stored["scale"], path, tuple(verdicts), tuple(changes))


def read_results(study: Study, file: str | os.PathLike[str]) -> tuple[str, dict[str, str], list[VariantResult]]:
    """Reads the results that a numbers.json holds.

    Args:
        study: The study they have to be of.
        file: A numbers.json, or its folder.

    Returns:
        Name of the scale, versions by package, and the results.

    Raises:
        InputError: If the file does not exist, is damaged or is one of another study.
    """
    stored, numbers = _read_numbers(study, _find_file(study, file, None))
    versions = stored.get("versions", {})
    return str(stored["scale"]), {str(key): str(value) for key, value in dict(versions).items()}, numbers


def _read_numbers(study: Study, path: Path) -> tuple[dict[str, Any], list[VariantResult]]:
    stored = _read(path)
    if stored["study"] != study.name:
        raise InputError(f"{path} has the numbers of {stored['study']!r}; expected those of {study.name!r}")
    if stored["scale"] not in study.scales:
        raise InputError(f"{path}: scale {stored['scale']!r}; expected one of {', '.join(study.scales)}")
    return stored, [_result(entry, path) for entry in stored["numbers"]]


def _find_file(study: Study, file: str | os.PathLike[str] | None, scale: str | None) -> Path:
    if file is not None:
        folder = check_folder_name(file)
        path = folder / "numbers.json" if folder.is_dir() else folder
        if not path.is_file():
            raise InputError(f"{path} does not exist: expected a numbers.json or its folder")
        return path
    if scale is not None and scale not in study.scales:
        raise InputError(f"scale: expected {' or '.join(map(repr, study.scales))}; got {scale!r}")
    scales = [scale] if scale is not None else list(reversed(list(study.scales)))
    places = [RUNS / f"{study.name}-{name}" / "numbers.json" for name in scales]
    places += [PUBLISHED / f"{study.name}.json"] if scale is None else []
    path = next((place for place in places if place.is_file()), places[0])
    if not path.is_file():
        looked = ", ".join(map(str, places))
        raise InputError(f"no numbers of {study.name} in {looked}: run `excite study run {study.origin or study.name}`")
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(stored[key], expected_type) for key, expected_type in _EXPECTED.items()):
            raise TypeError("study, scale, numbers or verdicts")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error!r}): expected the numbers.json of a study") from error
    return dict(stored)


_EXPECTED: Mapping[str, type] = {"study": str, "scale": str, "numbers": list, "verdicts": list}


def _result(entry: Mapping[str, Any], path: Path) -> VariantResult:
    try:
        values = {
            key: math.nan if value is None else float(value) for key, value in entry.items() if key not in _RESERVED
        }
        flags = tuple(map(str, entry["flags"]))
        resamples, curves = (
            {
                key: [math.nan if value is None else float(value) for value in line]
                for key, line in entry.get(name, {}).items()
            }
            for name in ("resamples", "curves")
        )
        by_chance, settings = bool(entry.get("by_chance", False)), str(entry.get("settings", ""))
        return VariantResult(
            str(entry["arm"]), int(entry["seed"]), values, flags, by_chance, resamples, curves, settings
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path} is damaged ({error!r}): expected numbers by variant and seed") from error
