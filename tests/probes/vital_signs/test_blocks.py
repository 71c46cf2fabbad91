"""Blocks and attention modules, from the modules alone."""

import pytest
from torch import nn

from excite.probes.vital_signs.blocks import attention_modules, blocks, has_attention
from transformer_zoo import NAMES, make


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_every_model(name):
    zoo = make(name)
    assert list(blocks(zoo.model)) == zoo.blocks
    assert set(zoo.attention) <= set(attention_modules(zoo.model))


def test_encoder_layers_of_torch_are_blocks():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 3)
    assert list(blocks(model)) == ["layers.0", "layers.1", "layers.2"]


@pytest.mark.parametrize("name", ["MHA", "GQA", "MultiHead", "CausalSelfAttn"])
def test_short_names_of_attention(name):
    attention = type(name, (nn.Linear,), {})
    assert list(blocks(nn.Sequential(nn.Linear(2, 2), nn.Sequential(attention(2, 2))))) == ["1"]
    assert not has_attention(nn.Sequential(type("Alpha", (nn.Linear,), {})(2, 2)))


def test_other_networks_have_none():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    assert blocks(model) == {}
    assert not has_attention(model)
