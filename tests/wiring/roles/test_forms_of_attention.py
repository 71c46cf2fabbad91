"""Attention in the forms in which people write it: its projections are found, and their laws hold."""

import math

import pytest
import torch
from benchmarks.transformer_laws import rates
from torch import nn

import excite
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
