"""One process among those that train a model."""

from __future__ import annotations

import pytest
import torch

from excite.train.distributed.processes import many_processes


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for environment in ({}, {"WORLD_SIZE": "1"}):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with many_processes("cpu") as here:
            model = torch.nn.Linear(2, 1)
            assert (here.rank, here.size, here.first) == (0, 1, True)
            assert here.wrap(model) is model
            assert not torch.distributed.is_initialized()
