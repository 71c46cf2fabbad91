"""Training and test margins over the steps of a run, and their gap: the first chart of a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from excite.report.subsample import between, extremes, plain
from excite.report.view import RunView
from excite.runs.reader import MetricsReader

METRICS = {
    "train": "margin_gap/median/train",
    "test": "margin_gap/median/test",
    "gap": "margin_gap/gap",
    "chance": "margin_gap/chance",
}
_POINTS = 500  # of a curve


def margin_history(runs: Sequence[RunView]) -> list[dict[str, Any]]:
    """Median margins of training and test points, their gap and its chance level, for the runs that measured any.

    Args:
        runs: The runs of a page.

    Returns:
        One entry per run: its index `run`, and of each of "train", "test", "gap" and "chance" that was measured the
        curve {"x": steps, "y": values}.
    """
    found = []
    for i, run in enumerate(runs):
        there = set(run.follower.names())
        curves = {part: _curve(run.follower, name) for part, name in METRICS.items() if name in there}
        if curves.keys() & {"train", "test"}:
            found.append({"run": i, **curves})
    return found


def _curve(follower: MetricsReader, name: str) -> dict[str, list[Any]]:
    binned = follower.binned(name, _POINTS // 2 - 1, None, None)
    steps, values = extremes(*(follower.series(name) if binned is None else between(*binned)), _POINTS)
    return {"x": plain(steps), "y": plain(values)}
