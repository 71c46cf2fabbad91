"""Random activation patterns and their Kronecker products."""

from __future__ import annotations

from functools import reduce

import numpy as np

from excite.bounds.trajectory.modular import Array


def draw(rng: np.random.Generator, count: int, widths: tuple[int, ...], share: float = 0.75) -> list[Array]:
    return [rng.random((count, width)) < share for width in widths]


def kronecker(layers: list[Array]) -> Array:
    """(entries, N): the vectors themselves."""
    rows = [reduce(np.kron, [layer[i].astype(float) for layer in reversed(layers)]) for i in range(len(layers[0]))]
    return np.stack(rows, 1)
