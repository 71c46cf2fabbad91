"""Compiled, data-parallel and lazy models."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from excite._core.wrappers import (
    eagerly,
    in_reentrant_checkpoint,
    is_sharded,
    is_shared,
    refuse_lazy,
    unwrap,
    without_reentrant_checkpointing,
)
from excite.errors import ModelError


def test_wrappers_are_taken_off():
    model = nn.Linear(2, 1)
    assert unwrap(nn.DataParallel(model)) is model
    assert unwrap(torch.compile(model, backend="eager")) is model
    assert unwrap(model) is model


def test_plain_models_need_no_stance():
    with eagerly(nn.Linear(2, 1)) as stance:
        assert stance is None


def test_lazy_parameters_are_refused_by_name():
    with pytest.raises(ModelError, match=r"'0\.weight' is not initialized"):
        refuse_lazy(nn.Sequential(nn.LazyLinear(2)))


def test_one_process_shares_and_shards_nothing():
    assert not is_shared(nn.Linear(2, 1))
    assert not is_sharded(nn.Linear(2, 1))


def test_reentrant_checkpoints_keep_activations():
    layer, x = nn.Linear(2, 1), torch.randn(3, 2, requires_grad=True)

    def forward(x):
        assert in_reentrant_checkpoint()
        return layer(x)

    with without_reentrant_checkpointing():
        (gradient,) = torch.autograd.grad(checkpoint(forward, x, use_reentrant=True).sum(), x)
    torch.testing.assert_close(gradient, layer.weight.detach().expand(3, 2))
    assert not in_reentrant_checkpoint()
