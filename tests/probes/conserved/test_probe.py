"""The probe of conserved quantities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import excite
from excite import InputError
from excite.probes import Conservation, Every, Loss
from models import build
from probes.conserved.trainings import OPTIMIZERS, PARTS, train


def test_the_probe_writes_the_ledger(tmp_path: Any) -> None:
    def watched(folder: str, stop: int) -> Any:
        model, x = build("mlp")
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        probes = [Loss(), Conservation(Every(2), off_diagonal=True)]
        with excite.watch(model, x, tmp_path / folder, optimizer, probes, strict=True) as watch:
            for step in range(6):
                if step == stop:
                    state = watch.state_dict()
                    again = excite.watch(model, x, None, optimizer, [Conservation(Every(2))])
                    again.load_state_dict(state)
                    again.close()
                train(model, optimizer, x, 1, seed=step)
                watch.step(1.0)
        return excite.load_run(tmp_path / folder).frame()

    frame = watched("a", 3)
    last = {row.name: row.value for row in frame.itertuples(index=False)}
    assert last["conservation/rest/0"] < 1e-13 < last["conservation/drift/0"]
    shares = [last.get(f"conservation/{part}/0", 0.0) for part in PARTS]
    assert sum(shares) == pytest.approx(1, abs=1e-9)
    assert last["conservation/off-diagonal/0"] > 1e-4
    assert frame[frame.name == "conservation/drift/2"].step.tolist() == [0, 2, 4, 6]
    model, x = build("mlp")
    with pytest.raises(InputError, match="needs the optimizer"):
        excite.watch(model, x, probes=[Conservation()])


def test_without_parts_the_probe_writes_the_same_drift() -> None:
    found = []
    for parts in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(8, 3, dtype=torch.float64)
        probe = Conservation(Every(1), parts=parts)
        values = []
        with excite.watch(model, x, None, optimizer, [probe], strict=True):
            assert bool(optimizer._optimizer_step_post_hooks) is parts
            for _ in range(5):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                assert probe.ledger is not None
                values.append({entry.name: entry.moved for entry in probe.ledger.read().entries})
        found.append(values)
    assert found[0] == found[1]
    assert found[0][-1]["0"] > 0
    with pytest.raises(InputError, match="off_diagonal needs every step"):
        Conservation(parts=False, off_diagonal=True)
