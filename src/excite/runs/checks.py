"""Checks of what is about to be written: a value that cannot be stored is refused before it is buffered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np

from excite._core.checks import check_count, shown
from excite.errors import InputError
from excite.runs.metric_names import is_name

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
            yield name, float(value.item() if isinstance(value, np.ndarray) else value)
        except OverflowError as error:
            raise InputError(
                f"metric {name!r}: expected a number that fits into float64; got {shown(value)}"
            ) from error
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"metric {name!r}: expected a number; got {shown(value)}") from error
