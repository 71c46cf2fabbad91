"""Signs and directions of weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import excite
from excite import InputError
from excite.errors import ModelError
from excite.probes import Direction, Every, Signs, sign_changes
from excite.probes.base import StepContext
from probes.networks import line, put


def test_zero_counts_as_positive() -> None:
    before, after = torch.tensor([1.0, -1.0, 0.0, -0.5]), torch.tensor([0.0, 1.0, -0.1, -2.0])
    assert float(sign_changes([before], [after])) == 0.5
    with pytest.raises(ValueError, match="at least one tensor; got none"):
        sign_changes([before], [])


def test_signs_along_a_path_written_by_hand() -> None:
    path = [(1, 1, 1, 1), (1, -1, 1, 1), (1, 1, 1, 1), (1, 1, 1, -1), *[(1, 1, 1, -1)] * 4]
    model = line(*path[0])
    probe = Signs(Every(1), window=3)
    rows = []
    for step, values in enumerate(path):
        put(model, *values)
        found = probe.measure(StepContext(model, step))
        rows.append((float(found["changed"]), float(found["since"]), float(found["stable"])))
    assert rows == [
        (0, 0, 0), (0.25, 0, 0), (0.25, 0, 0), (0.5, 0, 0), (0.5, 1, 0), (0.25, 2, 0), (0, 3, 1), (0, 4, 1)
    ]  # fmt: skip


def test_signs_that_never_change_are_stable_after_a_window() -> None:
    model, probe = line(1, -1), Signs(Every(1), window=2)
    stable = [float(probe.measure(StepContext(model, step))["stable"]) for step in range(4)]
    assert stable == [0, 0, 1, 1]


def test_signs_are_the_same_after_a_restart(tmp_path: Any) -> None:
    def run(stop: int | None) -> list[float]:
        torch.manual_seed(0)
        model, probe = line(*torch.randn(50).tolist()), Signs(Every(1), window=3)
        found = []
        for step in range(8):
            if step == stop:
                torch.save(probe.state_dict(), tmp_path / "signs")
                probe = Signs(Every(1), window=3)
                probe.load_state_dict(torch.load(tmp_path / "signs"))
            put(model, *torch.randn(50).tolist())
            found.append(float(probe.measure(StepContext(model, step))["changed"]))
        return found

    assert run(4) == run(None)


def test_bad_input() -> None:
    with pytest.raises(InputError, match="at least 1; got 0"):
        Signs(window=0)
    with pytest.raises(InputError, match="at least 1; got True"):
        Direction(window=True)
    for probe in (Signs(), Direction()):
        with pytest.raises(ModelError, match="not finite at step 3"):
            probe.measure(StepContext(line(1, float("nan")), 3))
        probe.measure(StepContext(line(1, 2), 0))
    signs, direction = Signs(), Direction()
    for probe in (signs, direction):
        probe.measure(StepContext(line(1, 2), 0))
        with pytest.raises(ModelError, match=r"had shape|not those of the start"):
            probe.measure(StepContext(line(1, 2, 3), 1))


def test_both_are_written_to_a_run(tmp_path: Any) -> None:
    model = line(1, -1)
    with excite.watch(model, run=tmp_path / "run", probes=[Signs(Every(1), 2), Direction(Every(1), 2)]) as watch:
        for step in range(3):
            put(model, step, -1)
            watch.step()
    names = set(excite.load_run(tmp_path / "run").frame().name)
    assert {"signs/changed", "signs/stable", "signs/changed/weight", "direction/angle", "direction/norm"} <= names
