"""Checks of what is about to be written: a value that cannot be stored is refused before it is buffered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import Any

from excite._core.checks import check_count, is_whole, shown
from excite._version import __version__
from excite.errors import InputError, RunError

MAX_STEP = 2**63 - 1  # the largest integer of SQLite


def check_step(step: Any) -> int:
    """The step as an int."""
    return check_count(step, "step", 0, MAX_STEP)


def check_keep(keep: Any) -> int:
    """How many checkpoints are kept, as an int."""
    return check_count(keep, "keep")


def check_metrics(values: Any) -> Iterator[tuple[str, float]]:
    """Names and values as SQLite holds them: text and a double."""
    if not isinstance(values, Mapping):
        raise InputError(f"expected metrics as a dict of numbers by name; got {type(values).__name__}")
    for name, value in values.items():
        if not is_name(name):
            raise InputError(f"expected a metric name such as 'rank/effective/conv1'; got {name!r}")
        if type(value) is float:  # nearly all of them
            yield name, value
            continue
        shape = getattr(value, "shape", ())
        if prod(shape) != 1:
            raise InputError(f"metric {name!r}: expected one number; got shape {tuple(shape)}: log a summary")
        if isinstance(value, str | bytes | bytearray):  # float() reads numbers from text
            raise InputError(f"metric {name!r}: expected a number; got {value!r}")
        try:
            yield name, float(value.item() if hasattr(value, "item") else value)  # of arrays and tensors
        except OverflowError as error:
            raise InputError(
                f"metric {name!r}: expected a number that fits into float64; got {shown(value)}"
            ) from error
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"metric {name!r}: expected a number; got {shown(value)}") from error


@lru_cache(maxsize=1 << 14)  # the same few names at every step
def is_name(name: object) -> bool:
    """Whether this is a name such as 'norm' or 'rank/effective/conv1'."""
    return isinstance(name, str) and bool(name) and name.isprintable() and name == name.strip("/ ")


class NewerVersion(RunError):
    """Written by a newer Excite than this one."""


def check_version(what: object, value: Any, known: int) -> int:
    """The version that `what` says it has, at most `known`."""
    if isinstance(value, str) and value.isdecimal():  # the header of a checkpoint holds text
        value = int(value)
    if not is_whole(value) or value < 1:
        raise RunError(f"{what} is damaged: its version is {value!r}")
    if value > known:
        raise NewerVersion(
            f"{what} has format version {value}; Excite {__version__} reads versions up to {known}: upgrade Excite to open it"
        )
    return value
