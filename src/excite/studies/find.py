"""Finds the study that a user means: by name, by paper and figure, in a file, or in an installed package."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from excite._core.checks import shown
from excite.errors import ExciteError, InputError, one_line
from excite.studies.papers import PAPERS, describe, find_paper, parse_place
from excite.studies.registry import STUDIES
from excite.studies.study import Study

GROUP = "excite.studies"  # group of the entry points of packages that bring studies
_EXPECTED = "expected `STUDY = Study(...)` or `STUDY = experiment(...)` at its top level"


def find_study(reference: str | os.PathLike[str] | Study) -> Study:
    """The study that a reference means.

    Args:
        reference: The name of a study, a paper and a figure such as "persistency:6" or "persistency figure 6" (or a statement such
            as "invariances:theorem 1"), the path of a Python file that defines `STUDY`, or a study.

    Returns:
        The study.

    Raises:
        InputError: If there is none, or several for one figure. Near misses are suggested, never run.

    Example:
        >>> find_study("margin-losses").name
        'margin-losses'
    """
    if isinstance(reference, Study):
        return check_study(reference, "the study")
    if not isinstance(reference, str | os.PathLike):
        raise InputError(f"study: expected a name, a path or a Study; got {shown(reference)}")
    if isinstance(reference, os.PathLike) or reference.endswith(".py"):
        return load_file(Path(reference))
    if reference in STUDIES:
        return STUDIES[reference]
    installed = {point.name: point for point in _entry_points()}
    if reference in installed:
        return load_entry_point(installed[reference])
    paper, _, place = reference.partition(" ")
    if paper.lower() in PAPERS and place.strip():
        reference = f"{paper}:{place.strip()}"
    if ":" in reference:
        return _at_place(reference)
    raise InputError(_suggest(str(reference), [*STUDIES, *installed]))


def all_studies() -> tuple[dict[str, Study], dict[str, str]]:
    """The studies of Excite and of installed packages.

    Returns:
        The studies by name, and for each entry point that could not be loaded the reason in one line.
    """
    result, broken = dict(STUDIES), {}
    for point in _entry_points():
        try:
            study = load_entry_point(point)
            result[study.name] = study
        except ExciteError as error:
            broken[point.name] = one_line(error)
    return result, broken


def load_file(path: Path) -> Study:
    """The study that a Python file defines. The file is imported, that is, run; worker processes import it again.

    Raises:
        InputError: If the file does not exist, cannot be imported or defines no study.
    """
    path = path.expanduser()
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [other.name for other in path.parent.glob("*.py")], 1)
        hint = f"did you mean {str(path.parent / near[0])!r}?" if near else "expected a Python file that defines STUDY"
        raise InputError(f"{path} does not exist: {hint}")
    module = _import_file(path.resolve())
    study = getattr(module, "STUDY", None)
    if not isinstance(study, Study):
        raise InputError(f"{path} defines no study: {_EXPECTED}")
    check_study(study, str(path))
    if study.name in STUDIES:
        raise InputError(f"{path}: the name {study.name!r} is that of a study of Excite; choose another")
    return replace(study, origin=str(path))


def load_entry_point(point: EntryPoint) -> Study:
    """The study of an installed package: the object of the entry point, or `STUDY` of its module.

    Raises:
        InputError: If it cannot be imported, is no study, or takes the name of a study of Excite.
    """
    what = f"study {point.name!r} of entry point {point.value!r}"
    try:
        loaded = point.load()
    except Exception as error:
        raise InputError(f"{what} cannot be imported: {type(error).__name__}: {one_line(error)}") from error
    study = getattr(loaded, "STUDY", None) if isinstance(loaded, ModuleType) else loaded
    if not isinstance(study, Study):
        raise InputError(f"{what} is no study: {_EXPECTED}")
    check_study(study, what)
    if study.name in STUDIES or study.name != point.name:
        raise InputError(
            f"{what} is named {study.name!r}: expected the entry point's name, and none of Excite's studies"
        )
    return study


def check_study(study: Study, what: str) -> Study:
    """Refuses a study that would fail after its jobs have run: bad names, claims on variants that do not exist."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", study.name):
        raise InputError(f"{what}: expected a name of lower-case letters, digits and hyphens; got {study.name!r}")
    for scale in study.scales.values():
        names = [variant.name for variant in study.variants(scale)]
        slugs = {variant.slug for variant in study.variants(scale)}
        if not names or len(slugs) < len(names):
            raise InputError(f"{what}: expected variants with different names; got {', '.join(names) or 'none'}")
        for claim in study.claims(scale):
            missing = [name for name in claim.variants if name not in names]
            if missing or not claim.variants:
                raise InputError(
                    f"{what}: the claim {claim.text!r} names {', '.join(missing) or 'no variant'}; expected some of {', '.join(names)}"
                )
    for source in study.sources:
        parse_place(source)
    return study


def in_paper(key: str, studies: Iterable[Study]) -> list[Study]:
    """The studies with a source in this paper, in the order of their first place in it."""
    return [study for study in studies if any(place.paper == key for place in study.places)]


def _entry_points() -> Sequence[EntryPoint]:
    return sorted(entry_points(group=GROUP), key=lambda point: point.name)


@cache
def _import_file(path: Path) -> ModuleType:
    """Imports a file under its own name, so that worker processes find it: its folder becomes part of the search path."""
    name = path.stem
    if not name.isidentifier():
        raise InputError(f"{path.name}: expected a file name that Python can import, such as my_study.py")
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        raise InputError(f"{path.name}: Python knows another module named {name!r}; rename the file")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        sys.path.remove(str(path.parent))
        if not isinstance(error, Exception):
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        where = f"{path.name}, line {line}" if line else path.name
        raise InputError(f"{where}: {type(error).__name__}: {one_line(error)}") from error
    return module


def _at_place(reference: str) -> Study:
    place = parse_place(reference)
    paper = PAPERS[place.paper]
    studies, _ = all_studies()
    result = [study for study in studies.values() if any(place.covers(other) for other in study.places)]
    if len(result) == 1:
        return result[0]
    if result:
        names = ", ".join(f"{study.name} ({study.asks})" for study in result)
        raise InputError(f"{place} of {paper.title} has {len(result)} studies, choose one: {names}")
    places = dict.fromkeys(p for study in in_paper(paper.key, studies.values()) for p in study.places)
    ours = sorted((p for p in places if p.paper == paper.key), key=lambda p: (p.kind != "figure", p.kind.lower(), _order(p.number)))  # fmt: skip
    raise InputError(f"no study remakes {place} of {paper.title}; there are {describe(ours)}")


def _order(number: str) -> tuple[int, str]:
    digits = re.match(r"\d+", number)
    return (int(digits[0]) if digits else 0, number)


def _suggest(name: str, names: Sequence[str]) -> str:
    """Why a name is unknown, and what may have been meant."""
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    if match := re.fullmatch(r"(?:fig\w*\W*)?(\d+[a-z]?)", plain):
        papers = [key for key in PAPERS if _exists(f"{key}:{match[1]}")]
        if papers:
            return f"{name!r}: figure {match[1]} of which paper? {' or '.join(f'{key}:{match[1]}' for key in papers)}"
    try:
        paper = find_paper(plain)
    except InputError:
        near = [other for other in names if plain and other.startswith(plain)]
        near = near or [other for other in names if plain in other.split("-")]
        near = near or difflib.get_close_matches(plain, names, 3)
        if near:
            return f"unknown study {name!r}: did you mean {' or '.join(map(repr, near[:5]))}?"
        return f"unknown study {name!r}: expected one of {', '.join(names)}, PAPER:FIGURE, or the path of a file"
    ours = ", ".join(study.name for study in in_paper(paper.key, STUDIES.values()))
    return f"{name!r} is a paper: name a figure of it, such as {_example(paper.key)}, or one of its studies: {ours}"


def _exists(reference: str) -> bool:
    place = parse_place(reference)
    return any(place.covers(other) for study in STUDIES.values() for other in study.places)


def _example(key: str) -> str:
    place = next(place for study in in_paper(key, STUDIES.values()) for place in study.places if place.paper == key)
    return f"{key}:{place.number}" if place.kind == "figure" else f"'{key}:{place}'"
