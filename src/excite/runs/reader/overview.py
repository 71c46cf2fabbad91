"""The few values of a run that a list of runs shows, read by a fixed number of searches in its database."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from excite.runs.reader.metrics_reader import LAST, MetricsReader, checked_last, read_immutable
from excite.runs.reader.processes import Reader

ENDS, SPARK, MAX_ALERTS = 20, 40, 1000  # values at each end of the loss, of a sparkline, and names of alerts at most
_LOSS = "loss/step"
_ALERTS = f"""
WITH RECURSIVE every(name) AS (
    SELECT (SELECT min(name) FROM metrics WHERE name >= 'alert/' AND name < 'alert0')
    UNION ALL SELECT (SELECT min(name) FROM metrics WHERE name > every.name AND name < 'alert0') FROM every
    WHERE every.name IS NOT NULL LIMIT {MAX_ALERTS + 1}
) SELECT name FROM every WHERE name IS NOT NULL"""
_FIRST = f"SELECT value FROM metrics WHERE name = ? ORDER BY step LIMIT {ENDS}"
_NEWEST = f"SELECT value FROM metrics WHERE name = ? ORDER BY step DESC LIMIT {ENDS}"
_NONFINITE = (
    "SELECT min(step) FROM metrics WHERE name = ? AND (value IS NULL OR NOT value BETWEEN -1.7e308 AND 1.7e308)"
)
_RANGE = "SELECT (SELECT min(step) FROM metrics WHERE name = ?), (SELECT max(step) FROM metrics WHERE name = ?)"
Execute = Callable[[str, tuple[Any, ...]], Any]


@dataclass(frozen=True)
class Overview:
    """Last values of a run.

    Attributes:
        step: The last step at which anything was measured, or None.
        updated: When that was written, in seconds since 1970.
        latest: Last value of each requested metric that was measured; NaN if it was not a number.
        loss_first: The first values of `loss/step`, at most 20.
        loss_last: Its last values, at most 20.
        broken_at: The first step at which the loss was not finite, if its last value is not; else None.
        alerts: Names of the alerts that were written, `alert/RULE/METRIC`.
        spark: Name and at most 40 values, evenly spaced, of the first requested sparkline that was measured.
    """

    step: int | None = None
    updated: float | None = None
    latest: dict[str, float] = field(default_factory=dict)
    loss_first: tuple[float, ...] = ()
    loss_last: tuple[float, ...] = ()
    broken_at: int | None = None
    alerts: tuple[str, ...] = ()
    spark: tuple[str, tuple[float, ...]] | None = None


def read_overview(
    path: Path,
    names: Sequence[str],
    sparks: Sequence[str] = (_LOSS,),
    below: Path | None = None,
    seconds: float = 5.0,
    reader: Reader | None = None,
) -> Overview:
    """Reads the overview of one run, faster than a `MetricsReader`.

    While nobody writes, the database is opened as immutable, without the shared memory that WAL needs. Whoever calls this
    must make sure that the files are the same before and after, and read again if they are not.

    Args:
        path: The run folder.
        names: Metrics whose last value to read.
        sparks: Metrics for the sparkline; the first that was measured at two steps is taken.
        below: See `MetricsReader`.
        seconds: Time limit.
        reader: See `MetricsReader`.

    Returns:
        The overview.

    Raises:
        RunError: If the database is damaged or took too long.
    """
    deadline = time.monotonic() + seconds
    result = read_immutable(path, lambda execute: _overview(execute, names, sparks), below, deadline)
    if result is not None:
        return result
    with closing(MetricsReader(path, below, seconds, reader)) as metrics:
        metrics.refresh()
        return overview(metrics, names, sparks)


def overview(metrics: MetricsReader, names: Sequence[str], sparks: Sequence[str] = (_LOSS,)) -> Overview:
    """The overview of a run that is open already."""
    return metrics.read_together(lambda execute: _overview(execute, names, sparks))


def _overview(execute: Execute, names: Sequence[str], sparks: Sequence[str]) -> Overview:
    step, when = checked_last(execute(LAST, ()).fetchone()) or (None, None)
    latest = {}
    for name in names:
        row = execute("SELECT value FROM metrics WHERE name = ? ORDER BY step DESC LIMIT 1", (name,)).fetchone()
        if row is not None:
            latest[name] = _number(row[0])
    first, last = _loss_ends(execute)
    alerts = tuple(_text(row[0]) for row in execute(_ALERTS, ()).fetchall())[:MAX_ALERTS]
    spark = next((points for name in sparks if (points := _spark(execute, name)) is not None), None)
    nonfinite_step = None
    if last and not math.isfinite(last[-1]):
        nonfinite_step = execute(_NONFINITE, (_LOSS,)).fetchone()[0]
    return Overview(
        step, when, latest, first, last, None if nonfinite_step is None else int(nonfinite_step), alerts, spark
    )


def _loss_ends(execute: Execute) -> tuple[tuple[float, ...], tuple[float, ...]]:
    first = tuple(_number(row[0]) for row in execute(_FIRST, (_LOSS,)).fetchall())
    last = tuple(_number(row[0]) for row in execute(_NEWEST, (_LOSS,)).fetchall())
    return first, last[::-1]


def _spark(execute: Execute, name: str) -> tuple[str, tuple[float, ...]] | None:
    low, high = execute(_RANGE, (name, name)).fetchone()
    if low is None or high is None or not int(low) < int(high):
        return None
    count = min(SPARK, int(high) - int(low) + 1)
    steps = sorted({int(low) + round(i * (int(high) - int(low)) / (count - 1)) for i in range(count)})
    places = ", ".join(f"({step})" for step in steps)
    query = f"""WITH at(place) AS (VALUES {places}), found(step) AS (
        SELECT DISTINCT (SELECT min(step) FROM metrics WHERE name = ? AND step >= place) FROM at)
        SELECT (SELECT value FROM metrics WHERE name = ? AND metrics.step = found.step) FROM found ORDER BY step"""
    return name, tuple(_number(row[0]) for row in execute(query, (name, name)).fetchall())


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name of type {type(value).__name__}")
    return value
