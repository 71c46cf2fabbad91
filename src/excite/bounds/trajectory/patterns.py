"""Activation patterns of ReLU networks, and the slope of the linear map that each of them selects."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from excite.bounds.relu_network import ReluNetwork
from excite.errors import InputError

Patterns = list[Tensor]  # one of {0, 1} a hidden layer, (N, n_l)


def patterns(network: ReluNetwork, x: Tensor) -> Patterns:
    """Which units of each hidden layer are active at x (N, n)."""
    return [signal > 0 for signal in network.signals(x)[1:-1]]


def slopes(network: ReluNetwork, active: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """‖W_d S_{d−1} … W_2 S_1‖ and ‖W_d S_{d−1} … S_1 W_1‖ for each pattern, (N,) each.

    They say how much moving the first bias and moving the input change the output, before a sigmoid.
    """
    if len(network.weights[-1]) != 1:
        raise InputError(f"expected a network with one output; this one has {len(network.weights[-1])}")
    flowing = network.weights[-1].expand(len(active[0]), -1)
    for j in range(len(active) - 1, -1, -1):
        flowing = flowing * active[j]
        if j:
            flowing = flowing @ network.weights[j]
    return torch.linalg.vector_norm(flowing, dim=1), torch.linalg.vector_norm(flowing @ network.weights[0], dim=1)


def steepest(network: ReluNetwork) -> float:
    """A bound on the slope before a sigmoid per unit of ‖s‖, where s combines Kronecker products of patterns.

    It is the root of the sum over all paths of their squared products of weights.
    """
    total = torch.ones(network.weights[0].shape[1], dtype=torch.float64)
    for weight in network.weights:
        total = weight.square() @ total
    return float(total.sum().sqrt())
