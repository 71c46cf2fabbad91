"""A run with a warning planted before its spike."""

from __future__ import annotations

import numpy as np

from excite.studies.beyond.spike_warnings import ANY, LOSS, QUANTITIES, SpikeRun


def planted(onset: int | None, lead: int | None, name: str = "update", steps: int = 700, seed: int = 0) -> SpikeRun:
    """Noise below 3, and a value of 9 `lead` steps before the loss leaves its range."""
    rng = np.random.default_rng([seed, onset or 0])
    statistics = {key: 3 * rng.random(steps) for key in (*QUANTITIES, ANY, LOSS)}
    if onset is not None and lead is not None:
        statistics[name][onset - 1 - lead] = 9.0
    return SpikeRun(statistics, onset)
