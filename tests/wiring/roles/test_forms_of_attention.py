"""Attention in the forms in which people write it: its projections are found, and their laws hold."""

import math

import pytest
import torch
from benchmarks.transformer_laws import rates
from torch import nn

import excite
from excite.wiring.roles.attention import block_paths
from transformer_zoo import FORMS, FormsGPT

IDS = torch.randint(17, (3, 7), generator=torch.Generator().manual_seed(1))


def build(form):
    torch.manual_seed(0)
    return FormsGPT(form).double()


@pytest.mark.parametrize("form", FORMS)
def test_projections_are_found_and_their_laws_hold(form):
    model = build(form)
    wiring = excite.trace(model, IDS)
    heads = 1 if form == "ModulePerHead" else 2
    assert len(wiring.attentions) == 4 // heads
    for attention in wiring.attentions:
        assert (attention.heads, attention.key_heads) == (heads, 1 if form == "SharedKey" else heads)
        assert None not in (attention.query, attention.key, attention.value)
        assert (attention.output is None) == (form == "ModulePerHead")  # its output reads two attentions
    laws = {(group.role.rpartition(", ")[2], group.law) for group in wiring.groups if group.role}
    assert {("query", "channel" if form == "ComplexRotary" else "matrix"), ("value", "matrix")} <= laws
    assert all(group.law != "none" for group in wiring.groups)
    assert rates(model, {"ids": IDS}, wiring.groups) < 1e-14


def test_modules_of_one_head_are_numbered():
    wiring = excite.trace(FormsGPT("MultiHead").double(), IDS)
    assert [attention.name for attention in wiring.attentions] == [
        f"layer {i}, head {k}" for i in (0, 1) for k in (0, 1)
    ]
    assert wiring.roles["blocks.1.attention.heads.0.q"] == "layer 1, head 0, query"
    assert wiring.roles["blocks.1.attention.heads.0/head0"] == "layer 1, head 0"


def test_a_block_is_where_attentions_differ_first():
    paths = [
        "encoder.block.0.layer.0.a",
        "encoder.block.1.layer.0.a",
        "decoder.block.0.layer.0.a",
        "decoder.block.0.layer.1.c",
    ]
    paths += ["decoder.block.1.layer.0.a", "decoder.block.1.layer.1.c"]
    assert list(block_paths(paths).values()) == [path.partition(".layer")[0] for path in paths]
    assert block_paths(["0.h.2.attn", "attention"]) == {"0.h.2.attn": "0.h.2", "attention": ""}


def falcon(tf):
    """One key head, taken by an index."""
    return tf.FalconForCausalLM(
        tf.FalconConfig(vocab_size=17, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
    )


def gpt_oss(tf):
    """A learned logit beside those of the keys."""
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 24}
    return tf.GptOssForCausalLM(tf.GptOssConfig(vocab_size=17, pad_token_id=0, **sizes, **experts))


@pytest.mark.slow
@pytest.mark.parametrize("make", [falcon, gpt_oss])
def test_transformers_with_indexed_keys_and_sinks(make):
    tf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    wiring = excite.trace(make(tf).eval(), {"input_ids": IDS}, output="logits")
    assert [(attention.name, attention.heads, attention.key_heads) for attention in wiring.attentions] == [
        ("layer 0", 4, 1),
        ("layer 1", 4, 1),
    ]
    for attention in wiring.attentions:
        assert None not in (attention.query, attention.key, attention.value, attention.output)


class Tutorial(nn.Module):
    """PyTorch's own layers with a mask, which they compare with the causal one."""

    def __init__(self, cross):
        super().__init__()
        self.embed, self.head = nn.Embedding(17, 8), nn.Linear(8, 17)
        kind, stack = (
            (nn.TransformerDecoderLayer, nn.TransformerDecoder)
            if cross
            else (nn.TransformerEncoderLayer, nn.TransformerEncoder)
        )
        self.layers = stack(kind(8, 2, 16, dropout=0.0, batch_first=True), 2)
        self.cross = cross

    def forward(self, ids):
        x = self.embed(ids)
        mask = torch.full((x.shape[1],) * 2, -math.inf, dtype=x.dtype).triu(1)
        return self.head(self.layers(x, x.flip(1), tgt_mask=mask) if self.cross else self.layers(x, mask=mask))


@pytest.mark.parametrize("cross", [False, True])
def test_pytorchs_transformers_with_a_mask(cross):
    torch.manual_seed(0)
    before = torch.nn.modules.transformer._detect_is_causal_mask
    wiring = excite.trace(Tutorial(cross).double(), IDS)
    assert torch.nn.modules.transformer._detect_is_causal_mask is before
    assert [attention.heads for attention in wiring.attentions] == [2] * (4 if cross else 2)
    assert "layer 1, head 1, value" in {role.replace("self_attn, ", "") for role in wiring.roles.values()}
