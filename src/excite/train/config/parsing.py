"""Reading the config of a training from a TOML or JSON file, with errors that name the key."""

from __future__ import annotations

import difflib
import json
import math
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from excite.errors import InputError
from excite.train.config.sections import (
    AdamConfig,
    AdversarialConfig,
    AugmentConfig,
    DataConfig,
    ExcitationConfig,
    ModelConfig,
    RobustConfig,
    SGDConfig,
    TrainConfig,
)


def load_config(path: str | os.PathLike[str]) -> TrainConfig:
    """Reads and checks the config of a training.

    Args:
        path: .toml or .json file.

    Returns:
        The config, with defaults filled in.

    Raises:
        InputError: If the file cannot be read or parsed, or a key is unknown or has an invalid value.

    Example:
        >>> text = '''
        ... epochs = 1
        ... batch = 100
        ... data = {name = "moons"}
        ... model = {name = "mlp"}
        ... optimizer = {name = "sgd", lr = 0.1}
        ... '''
        >>> _ = Path("config.toml").write_text(text)
        >>> load_config("config.toml").data.name
        'moons'
    """
    return parse_config(read_config(path), str(Path(path)))


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a .toml or .json file, without checking its keys."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read the config {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"the config {file} is not text in UTF-8") from error
    if file.suffix not in (".toml", ".json"):
        raise InputError(f"expected a config named *.toml or *.json; got {file.name}")
    try:
        values = tomllib.loads(text) if file.suffix == ".toml" else json.loads(text)
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as error:
        raise InputError(
            f"the config {file} is not valid {file.suffix[1:].upper()}: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(values, dict):
        raise InputError(f"{file}: expected a table of settings; got {type(values).__name__}")
    return values


def parse_config(values: object, where: str = "config") -> TrainConfig:
    """Builds a config from nested dicts.

    Args:
        values: Keys and values.
        where: Name of the source, for error messages.

    Returns:
        The config, with defaults filled in.

    Raises:
        InputError: If a key is unknown or missing, or has an invalid value; the message names it.
    """
    if not isinstance(values, Mapping):
        raise InputError(f"{where}: expected a table of settings; got {type(values).__name__}")
    try:
        return TrainConfig.model_validate(dict(values))
    except ValidationError as error:
        raise InputError(f"{where}: {_explain(error, values)}") from error


# Messages by pydantic's type of error; other errors have pydantic's own message.
_EXPECTED = {
    "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "string_pattern_mismatch": "text such as '10 steps' or '1 epoch'", "bool_type": "true or false", "string_type": "text", "list_type": "a list", "dict_type": "a table",
    "model_type": "a table", "model_attributes_type": "a table", "finite_number": "a finite number",
}  # fmt: skip


def _explain(error: ValidationError, values: Mapping[str, Any]) -> str:
    problems = [(_path(p, values), p) for p in error.errors(include_url=False)]
    # A misspelled key also makes the right one missing: the misspelling is the better thing to say.
    path, first = next((item for item in problems if item[1]["type"] == "extra_forbidden"), problems[0])
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        known = _known_keys(path[:-1], values)
        near = difflib.get_close_matches(path[-1], known, 1)
        return f"unknown key {key!r}: " + (
            f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
        )
    if first["type"] == "missing":
        return f"{key!r} is missing"
    if first["type"] in ("union_tag_not_found", "union_tag_invalid"):
        name = first["input"].get("name") if isinstance(first["input"], Mapping) else None
        return f"'{key}.name': expected 'sgd', 'adam' or 'adamw'; got {_short(name)}"
    # Every member of a union complains. The one that came furthest is the one that was meant.
    related = [item for item in problems if item[0][: len(path)] == path]
    path, first = max(related, key=lambda item: len(item[0]))
    expected = dict.fromkeys(_wanted(problem) for at, problem in related if at == path)
    return f"{'.'.join(path)!r}: expected {' or '.join(expected)}; got {_short(first['input'])}"


def _wanted(problem: Any) -> str:
    if problem["type"] in _EXPECTED:
        return _EXPECTED[problem["type"]]
    context = problem.get("ctx", {})
    if problem["type"] == "literal_error":
        return str(context["expected"])
    for name, phrase in (("ge", "at least"), ("gt", "more than"), ("le", "at most"), ("lt", "less than")):
        if name in context:
            return (
                f"a number of {phrase} {context[name]:g}"
                if phrase.startswith("at")
                else f"a number {phrase} {context[name]:g}"
            )
    if "min_length" in context or "max_length" in context:
        return f"{context.get('min_length', context.get('max_length'))} values"
    return str(problem["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")


def _path(problem: Any, values: Any) -> list[str]:
    """The keys that lead to a problem: pydantic's location without the names it adds for members of unions."""
    path: list[str] = []
    for key in problem["loc"]:
        inside = key in values if isinstance(values, Mapping) else isinstance(values, list) and isinstance(key, int)
        if inside:
            values = values[key]
            path.append(str(key))
    return [*path, str(problem["loc"][-1])] if problem["type"] == "missing" else path


def _known_keys(path: list[str], values: Mapping[str, Any]) -> list[str]:
    sections: dict[str, type[BaseModel]] = {
        "data": DataConfig, "model": ModelConfig, "excitation": ExcitationConfig, "augment": AugmentConfig,
        "adversarial": AdversarialConfig, "robust": RobustConfig,
    }  # fmt: skip
    if not path:
        return list(TrainConfig.model_fields)
    if path[0] == "optimizer":
        return list((SGDConfig if values["optimizer"].get("name") == "sgd" else AdamConfig).model_fields)
    return list(sections[path[0]].model_fields)


def _short(value: object) -> str:
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
