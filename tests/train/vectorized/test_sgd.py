"""Steps written out by hand against torch.optim.SGD."""

from __future__ import annotations

import copy

import pytest
import torch

from excite.train.vectorized.perceptrons import Perceptrons
from excite.train.vectorized.sgd import CapturedWindow, SGDSettings, Steps, few_threads
from train.vectorized.ensemble_networks import mlp


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.01)])
def test_steps_are_those_of_torch(momentum: float, decay: float) -> None:
    model = mlp((3, 5, 1))
    reference, networks = copy.deepcopy(model), Perceptrons([model])
    dtype = networks.form.dtype
    x = torch.randn(4, 2, 3, dtype=dtype, generator=torch.Generator().manual_seed(0))  # 4 steps of 2 points
    y = torch.randn(4, 2, dtype=dtype, generator=torch.Generator().manual_seed(1))
    settings = SGDSettings("half-squared", torch.full((1,), 0.1, dtype=dtype), momentum, decay)
    steps = Steps(networks, settings, batch=2, steps=4, watched=1)
    with torch.no_grad():
        steps.inputs.copy_(torch.stack([networks.prepare(points[None]) for points in x]))
        steps.targets.copy_(y[:, None, :, None])
        steps.factors.fill_(0.5 * (0.1 if settings.plain else 1.0))
        steps.run(4)
        networks.write_back()
    optimizer = torch.optim.SGD(reference.parameters(), 0.1, momentum=momentum, weight_decay=decay)
    for points, targets in zip(x, y):
        optimizer.zero_grad()
        ((reference(points)[:, 0] - targets).square() / 2).mean().backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(ours, theirs)


def test_the_cpu_is_not_captured_and_threads_are_restored() -> None:
    networks = Perceptrons([mlp((2, 3, 1))])
    settings = SGDSettings("half-squared", torch.ones(1, dtype=networks.form.dtype), 0.0, 0.0)
    steps = Steps(networks, settings, batch=1, steps=1, watched=1)
    assert CapturedWindow(steps, True).why_not == "not on a CUDA device"
    assert CapturedWindow(steps, False).why_not == "capture=False"
    before = torch.get_num_threads()
    with few_threads(networks, 1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
