"""The path kernel: on how many paths from an input to the output of a network all units are active at each of two points.

s(x) has an entry for every path, 1 where all of its units are active at x. There are far too many entries to write down, but inner products
are counts, ⟨s(x), s(x')⟩ = the number of paths through units that are active at both points, and those follow stage by stage: with the
matrices of 0 and 1 that say which units feed which, n_k = g_k(x) g_k(x') Σ_j A_kj n_j, from ones at the inputs. For a fully connected
network that is the product of the counts of common active units of its layers, times the number of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from excite.bounds.trajectory.modular import Array, TooLong
from excite.errors import ModelError
from excite.wiring.piecewise import PiecewiseLinear

_PAIRS = 2**22  # numbers of one stage that are held at once


class PathKernel:
    """Inner products of path activations of a network with one output, given by the 0/1 matrices (N, n_k) of its hidden stages.

    Args:
        net: The network.

    Raises:
        ModelError: If it has several outputs, or units whose slopes are not 0 and 1.
    """

    def __init__(self, net: PiecewiseLinear):
        if net.sizes[-1] != 1:
            raise ModelError(f"expected a network with one output; this one has {net.sizes[-1]}")
        if any(slopes != (0.0, 1.0) for slopes in net.slopes[1:-1]):
            raise ModelError("expected ReLUs, with slopes 0 and 1; this network has others")
        self.sizes = net.sizes
        self.feeds = {key: (matrix != 0).numpy().astype(np.float64) for key, matrix in net.maps.items()}

    def inner(self, left: Sequence[Array], right: Sequence[Array], p: int) -> Array:
        """Inner products modulo p, (N, M)."""
        rows, columns = self._length(left), self._length(right)
        counts = np.zeros((rows, columns), np.int64)
        some = max(1, _PAIRS // max(1, columns * max(self.sizes)))
        for start in range(0, rows, some):
            rows_of_left = [layer[start : start + some] for layer in left]
            products = [(a[:, None] & b[None]).reshape(-1, a.shape[1]) for a, b in zip(rows_of_left, right)]
            counts[start : start + some] = self._count(products, p).reshape(-1, columns)
        return counts

    def squares(self, rows: Sequence[Array], p: int) -> Array:
        """Inner products of the vectors with themselves modulo p, (N,)."""
        return self._count(rows, p).astype(np.int64)

    def alive(self, rows: Sequence[Array]) -> Array:
        """Which vectors are not zero, (N,): sums of counts have no rounding to zero."""
        return self._count(rows, None) > 0

    def round(self, basis: Sequence[Array], new: Sequence[Array]) -> tuple[Array, Array]:
        """There is no certified rounding here."""
        raise TooLong("a coefficient is a rational with too many digits")

    def _count(self, gates: Sequence[Array], p: int | None) -> Array:
        """The number of active paths to the output, (N,); modulo p, where sums of fan-ins below 2²⁷ are exact."""
        counts = [np.ones((1, self.sizes[0]))]
        for stage in range(1, len(self.sizes)):
            total = np.zeros((1, self.sizes[stage]))
            for (to, source), feed in self.feeds.items():
                if to == stage:
                    total = total + counts[source] @ feed.T
            total = total if p is None else np.fmod(total, p)
            counts.append(total * gates[stage - 1] if stage < len(self.sizes) - 1 else total)
        return np.broadcast_to(counts[-1][:, 0], (self._length(gates),))

    def _length(self, gates: Sequence[Array]) -> int:
        return len(gates[0]) if len(gates) else 1
