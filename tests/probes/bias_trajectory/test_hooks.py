"""Hooks of the trajectory probe in the user's passes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from excite.probes import Every, Trajectory
from models import build
from probes.bias_trajectory.trainings import Training, squared


@pytest.mark.slow
def test_the_graph_is_not_kept_alive():
    model, x = build("mlp")
    with Training(model, x, Trajectory(Every(1), clean=Every(1))) as t:
        h = model[:2](x)
        alive = weakref.ref(h)
        squared(model[2:](h), torch.zeros(4, 1)).backward()  # a part used alone is no training pass of the model
        f = model(x)
        node = weakref.ref(f.grad_fn) if hasattr(f.grad_fn, "__weakref__") else None
        f.sum().backward()
        t.watch.step()
        del h, f
        gc.collect()
        assert alive() is None
        assert node is None or node() is None


def test_an_exception_in_the_forward_pass_leaves_no_mode_behind():
    model, x = build("functional")
    with Training(model, x, Trajectory(Every(1))) as t:
        with pytest.raises(RuntimeError):
            model(x[:, :2])
        assert torch.overrides._len_torch_function_stack() == 0
        t.step(x, torch.zeros(4, 1, dtype=torch.float64))
    assert torch.overrides._len_torch_function_stack() == 0
