"""Roles by the names that metrics have."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import excite
from models import transformer
from wiring.roles.test_names import TOKENS, Decoder


def test_roles_of_layers_heads_blocks_laws_and_junctions():
    roles = excite.trace(Decoder(gated="yes"), TOKENS).roles
    expected = {
        "blocks.1.qkv": "layer 1, query, key and value",
        "blocks.1.qkv.weight": "layer 1, query, key and value, weight",
        "blocks.1.qkv.bias": "layer 1, query, key and value, bias",
        "blocks.1.qkv/query/head1": "layer 1, head 1, query",
        "blocks.1.qkv>blocks.1.qkv/head1": "layer 1, head 1, query → key",
        "blocks.1.qkv>blocks.1.out/head0": "layer 1, head 0, value → output",
        "blocks.1/head1": "layer 1, head 1",
        "blocks.1": "layer 1",
        "blocks.1.gate": "layer 1, MLP gate",
        "blocks.1.norm1": "layer 1, norm before attention",
        "tok_embed": "token embedding",
        "norm": "final norm",
    }
    assert {name: roles.get(name) for name in expected} == expected


def test_fused_projection_of_multi_head_attention_is_its_module():
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    roles = excite.trace(model, torch.randn(2, 3, 8)).roles
    assert roles["self_attn"] == roles["self_attn.in_proj_weight"].removesuffix(", in_proj_weight")
    assert roles["self_attn/head1"].endswith("head 1")


def test_other_models_have_none_and_rows_are_plain():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    assert excite.trace(model, torch.zeros(2, 4)).roles == {}
    wiring = excite.trace(Decoder(), TOKENS)
    assert {row["name"]: row["role"] for row in wiring.rows()["roles"]} == wiring.roles


@pytest.mark.slow
def test_norms_behind_the_blocks_of_bert():
    model, x = transformer("bert", layers=2)
    roles = excite.trace(model, x, output="logits").roles
    assert roles["bert.encoder.layer.0.attention.output.LayerNorm"] == "layer 0, norm before MLP"
    assert roles["bert.encoder.layer.0.output.LayerNorm"] == "layer 0, norm after MLP"
