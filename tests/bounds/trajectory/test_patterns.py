"""Activation patterns and the slopes that they select."""

from __future__ import annotations

import torch

from excite.bounds.relu_network import as_module, relu_network
from excite.bounds.trajectory.patterns import patterns, slopes, steepest


def test_slopes_are_those_of_autograd() -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    pairs = [(drawn(5, 3), drawn(5)), (drawn(4, 5), drawn(4)), (drawn(1, 4), drawn(1))]
    x = drawn(20, 3).requires_grad_()
    network = relu_network(pairs, x.detach())
    active = patterns(network, x.detach())
    assert [tuple(layer.shape) for layer in active] == [(20, 5), (20, 4)]
    (gradient,) = torch.autograd.grad(as_module(pairs)(x).sum(), x)
    bias, inputs = slopes(network, active)
    torch.testing.assert_close(inputs, gradient.norm(dim=1))
    sigma = torch.linalg.matrix_norm(pairs[0][0], 2)
    assert (inputs <= sigma * bias * (1 + 1e-12)).all()
    length = (
        torch.stack([layer.sum(1) for layer in active]).prod(0).sqrt()
    )  # of the Kronecker product of the activations
    assert (inputs <= steepest(network) * length * (1 + 1e-12)).all()
