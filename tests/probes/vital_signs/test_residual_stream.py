"""Residual stream after each block, against plain float64."""

import pytest
import torch

import excite
from excite.probes import ResidualStream
from excite.probes.base import StepContext
from transformer_zoo import NAMES, captured, make, slow_stream_signs


@pytest.mark.parametrize("name", NAMES)
def test_streams_are_those_of_a_slow_version(name):
    zoo = make(name)
    _, outputs, _ = captured(zoo.model, zoo.blocks, zoo.example)
    expected = {
        f"{quantity}/{path}": value
        for path in zoo.blocks
        for quantity, value in slow_stream_signs(outputs[path][:2]).items()
    }
    found = ResidualStream().measure(StepContext(zoo.model, 0, example=zoo.example))
    assert {key: float(value) for key, value in found.items()} == pytest.approx(expected, rel=1e-10)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in zoo.model.modules())
    assert zoo.model.training


def test_a_model_without_blocks_is_refused():
    with pytest.raises(excite.ModelError, match="no blocks found"):
        ResidualStream().attach(StepContext(torch.nn.Linear(3, 2), 0, example=torch.randn(4, 3)))
