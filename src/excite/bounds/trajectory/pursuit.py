"""Basis pursuit over activations: min Σ_k φ_k |a_k| with Σ_k a_k s_k = s, for many s at once.

Activations are Kronecker products, given by one 0/1 matrix a layer; only their inner products are used, so that the size
of the program is the number of distinct columns, whatever the depth. Which s are combinations of the columns, and the
equations a_B + C z = c(s) in a basis B and the other columns z, are exact, or rounded where exact numbers have too many
digits: then Σ_k a_k s_k misses s by some r, and `max_slope` ‖r‖ is added to the value. Columns that no equation ties together are
solved on their own, and each distinct right side once, by HiGHS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.optimize import linprog
from scipy.sparse.csgraph import connected_components

from excite.bounds.trajectory.modular import Array, Grams, Kernel, Kronecker

_ROWS = 300  # equations passed to the solver at once


@dataclass(frozen=True)
class Pursuit:
    """`values` (M,) are the minima, infinity where s is no combination of the columns; `same`: s is one of them."""

    values: Array
    same: Array
    columns: int  # distinct ones
    rank: int
    programs: int  # solved
    rounding: float  # the most that was added for rounded equations; 0 if they are exact

    @property
    def reached(self) -> Array:
        """Which vectors are combinations of the columns, (M,)."""
        return np.isfinite(self.values)


def pursue(
    columns: Sequence[Array], cost: Array, new: Sequence[Array], max_slope: float, kernel: Kernel | None = None
) -> Pursuit:
    """`columns`: (N, n_l) for each layer, `cost` φ (N,) at least 0, `new`: (M, n_l) for each layer.

    `max_slope`: the most that a vector of norm one can add to what the value bounds. `kernel`: inner products of the vectors; by
    default those of Kronecker products.
    """
    kernel = kernel or Kronecker()
    first, back = distinct(columns)
    cheapest = np.full(len(first), np.inf)
    np.minimum.at(cheapest, back, cost)
    unique = [layer[first] for layer in columns]
    alive = kernel.alive(unique)  # others are the vector 0
    unique, cheapest = [layer[alive] for layer in unique], cheapest[alive]
    some, index = distinct(new)
    points = [layer[some] for layer in new]
    known = {row.tobytes() for row in _packed(columns)}
    same = np.array([row.tobytes() in known for row in _packed(points)], bool)
    grams = Grams(unique, kernel)
    reached = grams.depends(points)
    values = np.full(len(some), np.inf)
    inside = [layer[reached] for layer in points]
    basis, coefficients, missed = grams.coefficients([np.concatenate(pair) for pair in zip(inside, unique)])
    further = np.setdiff1d(np.arange(len(cheapest)), basis)
    tied = len(inside[0]) + further
    price = cheapest[further] + max_slope * missed[tied]
    minima, programs = _minimize(coefficients[:, : len(inside[0])], coefficients[:, tied], cheapest[basis], price)
    extra = max_slope * missed[: len(inside[0])]
    values[reached] = minima + extra
    rounding = float(extra.max(initial=0.0))
    return Pursuit(values[index], same[index], len(cheapest), len(basis), programs, rounding)


def distinct(layers: Sequence[Array]) -> tuple[Array, Array]:
    """Where each distinct pattern stands first, (D,), and which one each point has, (N,)."""
    rows = _packed(layers)
    _, first, back = np.unique(rows, return_index=True, return_inverse=True)
    return first, back.reshape(-1)


def _packed(layers: Sequence[Array]) -> Array:
    """One value of raw bytes per point."""
    bits = np.ascontiguousarray(np.packbits(np.concatenate(list(layers), 1).astype(bool), axis=1))
    return bits.view(np.dtype((np.void, bits.shape[1]))).reshape(-1)


def _minimize(right: Array, ties: Array, cost: Array, price: Array) -> tuple[Array, int]:
    """min over z of Σ cost |c − C z| + Σ price |z| for each column c of `right` (r, M); C is `ties` (r, n − r)."""
    rows, _ = ties.shape
    graph = sparse.coo_array(ties != 0)
    nodes = rows + ties.shape[1]
    edges = sparse.coo_array((np.ones(graph.nnz), (graph.row, rows + graph.col)), shape=(nodes, nodes))
    _, label = connected_components(edges, directed=False)
    alone = ~(ties != 0).any(1)
    values = cost[alone] @ np.abs(right[alone])
    programs = 0
    for component in np.unique(label[rows:]):
        rows_of_component, tied = np.flatnonzero(label[:rows] == component), np.flatnonzero(label[rows:] == component)
        sides, back = np.unique(right[rows_of_component], axis=1, return_inverse=True)
        minima = np.zeros(sides.shape[1])
        used_sides = np.flatnonzero(sides.any(0))
        size = max(1, _ROWS // len(rows_of_component))
        for start in range(0, len(used_sides), size):
            some = used_sides[start : start + size]
            minima[some] = _solve(
                sides[:, some], ties[np.ix_(rows_of_component, tied)], cost[rows_of_component], price[tied]
            )
        programs += len(used_sides)
        values = values + minima[back.reshape(-1)]
    return values, programs


def _solve(sides: Array, ties: Array, cost: Array, price: Array) -> Array:
    """The program for each column of `sides` (r, m): variables a⁺, a⁻ ≥ 0 with a_B + C z = c, block by block.

    What is returned is the value at the solver's z with a_B = c − C z, so that rounding can never make it too small.
    """
    count = sides.shape[1]
    r, t = ties.shape
    block = sparse.csr_array(np.hstack([np.eye(r), -np.eye(r), ties, -ties]))
    program = linprog(
        np.tile(np.concatenate([cost, cost, price, price]), count),
        A_eq=sparse.block_diag([block] * count, format="csr"),
        b_eq=sides.T.reshape(-1),
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if program.x is None:
        return cost @ np.abs(sides)  # z = 0 is a solution, if not the best
    signed = program.x.reshape(count, -1)[:, 2 * r :]
    z = (signed[:, :t] - signed[:, t:]).T  # (t, m)
    return np.asarray(np.minimum(cost @ np.abs(sides - ties @ z) + price @ np.abs(z), cost @ np.abs(sides)))
