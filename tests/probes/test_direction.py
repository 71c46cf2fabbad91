"""Directions of weight vectors and the angles between them."""

from __future__ import annotations

import math

import pytest
import torch

from excite.probes import Direction, Every, angle
from excite.probes.base import StepContext
from probes.networks import line, put


def test_angles() -> None:
    one, other = [torch.tensor([3.0]), torch.tensor([0.0])], [torch.tensor([0.0]), torch.tensor([5.0])]
    assert float(angle(one, other)) == pytest.approx(math.pi / 2)
    assert float(angle(one, [torch.tensor([-1.0]), torch.tensor([0.0])])) == pytest.approx(math.pi)
    tiny = torch.tensor([1.0, 1e-9], dtype=torch.float64)
    assert float(angle([tiny], [torch.tensor([7.0, 0.0], dtype=torch.float64)])) == pytest.approx(1e-9, rel=1e-6)


def test_a_growing_norm_with_a_fixed_direction_converges() -> None:
    """w(t) = (t, 1) turns by less and less: Assumption 2's direction is (1, 0), whose second entry vanishes."""
    model, probe = line(1, 1), Direction(Every(1), window=10)
    angles, smallest = [], []
    for step in range(1, 200):
        put(model, step, 1)
        found = probe.measure(StepContext(model, step))
        smallest.append(float(found["smallest"]))
        if "angle" in found:
            angles.append(float(found["angle"]))
            assert angles[-1] == pytest.approx(math.atan2(1, step - 10) - math.atan2(1, step), abs=1e-9)
    assert angles == sorted(angles, reverse=True)
    assert smallest[-1] < 0.006
    assert float(found["total"]) == pytest.approx(math.pi / 4 - math.atan2(1, 199), abs=1e-9)
    assert len(probe._snapshots) <= 11


def test_directions_are_the_same_after_a_restart() -> None:
    def run(stop: int | None) -> list[float]:
        torch.manual_seed(0)
        model, probe = line(1, 2, 3), Direction(Every(1), window=2)
        found = []
        for step in range(7):
            if step == stop:
                state = probe.state_dict()
                probe = Direction(Every(1), window=2)
                probe.load_state_dict(state)
            put(model, *torch.randn(3).tolist())
            values = probe.measure(StepContext(model, step))
            found += [float(values["total"]), float(values.get("angle", -1.0))]
        return found

    assert run(3) == run(None)
