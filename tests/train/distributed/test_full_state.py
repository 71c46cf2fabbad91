"""States with full tensors; sharded ones are tested with real shards in test_data_parallel.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from excite.train.distributed.full_state import (
    broadcast_buffers,
    full_state,
    shard_like,
    shard_optimizer_state,
)


class Shards(torch.Tensor):
    """A tensor that is put together on request, as a DTensor is."""

    def full_tensor(self) -> torch.Tensor:
        return torch.arange(4.0)


def test_shards_are_put_together_where_they_are_kept() -> None:
    tree: dict[str, Any] = {"a": torch.zeros(2).as_subclass(Shards), "b": [torch.ones(1), (3, "text")]}
    state = full_state(tree, on_this_rank=True)
    assert state["a"].tolist() == [0, 1, 2, 3]
    assert state["b"] == [torch.ones(1), (3, "text")]
    assert full_state(tree, on_this_rank=False)["a"] is None


def test_plain_tensors_are_not_cut() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert shard_like(model.state_dict(), model.state_dict()).keys() == model.state_dict().keys()
    state = optimizer.state_dict()
    assert shard_optimizer_state(optimizer, state)["state"][0]["exp_avg"] is state["state"][0]["exp_avg"]


def test_a_model_without_buffers_needs_no_broadcast() -> None:
    with pytest.raises(ValueError, match="process group"):  # there is none
        broadcast_buffers(nn.BatchNorm1d(2))
    broadcast_buffers(nn.Linear(2, 1))
