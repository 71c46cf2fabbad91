"""The user's config as JSON values: what a run stores, shows and compares."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from os import PathLike, fspath
from typing import Any

import numpy as np
import torch

from excite._core.checks import as_scalar, shown
from excite.errors import InputError

_LONGEST = 200  # characters of the repr of a value that is not JSON
_DEEPEST = 20  # levels
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def as_settings(config: object) -> dict[str, Any]:
    """A config as a dict of JSON values.

    Keys become strings, tuples and sets lists, paths strings, enumerations their values, one-element tensors and arrays
    numbers, functions and classes their import path. Any other value becomes its repr without memory addresses, at most 200
    characters: two runs with equal settings store equal values.

    Args:
        config: A mapping, a dataclass, an `argparse.Namespace` or a pydantic model.

    Returns:
        The settings.

    Raises:
        InputError: If the config is none of these, or contains itself.
    """
    members = _members(config)
    if members is None or isinstance(config, type):
        raise InputError(f"config: expected a dict, a dataclass or an argparse.Namespace; got {shown(config)}")
    return {str(key): _plain(value, 1) for key, value in members.items()}


def _members(value: object) -> Mapping[Any, Any] | None:
    """Names and values of what has them; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, argparse.Namespace):
        return vars(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(declared := getattr(type(value), "model_fields", None), Mapping):  # pydantic
        return {name: getattr(value, name) for name in declared}
    return None


def _plain(value: Any, depth: int) -> Any:
    if depth > _DEEPEST:
        raise InputError(f"config: expected at most {_DEEPEST} levels: does it contain itself?")
    if isinstance(value, Enum):
        return _plain(value.value, depth + 1)
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = as_scalar(value) if not isinstance(value, np.generic) else value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, PathLike):
        return str(fspath(value))
    if (inside := None if isinstance(value, type) else _members(value)) is not None:
        return {str(key): _plain(item, depth + 1) for key, item in inside.items()}
    if isinstance(value, set | frozenset):
        return sorted((_plain(item, depth + 1) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if (name := getattr(value, "__qualname__", None)) is not None and (module := getattr(value, "__module__", None)):
        return f"{module}.{name}"
    return _described(value)


def _described(value: object) -> str:
    try:
        line = " ".join(_ADDRESS.sub("", repr(value)).split())
    except Exception:
        line = f"<{type(value).__name__}>"
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."
