"""Margins and outcomes whose story is known."""

from types import SimpleNamespace

import numpy as np
import torch

from excite.margin import Margins
from excite.margin.evidence import Evidence

PIXELS = SimpleNamespace(low=0.0, high=1.0, pixels=True)


def evidence(n, flat=0):
    return Evidence(n, flat, 0, 0, 0, 0, min(n, 64), 0, 0)


def sample(rng, median, n=500, wrong=0.08, unit=PIXELS, checked=True, flat=0):
    """Margins with about this median: a normal sample, the fraction `wrong` misclassified."""
    values = np.maximum(rng.normal(median, median / 4, n), 1e-6)
    values[: round(wrong * n)] = 0
    found = Margins(torch.tensor(values), "inf", evidence=evidence(n, flat) if checked else None)
    object.__setattr__(found, "unit", unit)
    return found


def both(train, test, seed=0, **options):
    rng = np.random.default_rng(seed)
    return {"train": sample(rng, train, **options), "test": sample(rng, test, **options)}
