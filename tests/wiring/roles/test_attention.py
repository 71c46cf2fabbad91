"""Where attention is: the weights of its queries, keys, values and outputs, by head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import excite
from models import FAMILIES, Heads, transformer


class Written(nn.Module):
    """Attention by hand: fused projection, grouped keys, one of several ways to multiply."""

    def __init__(self, way: str, heads: int = 4, keys: int = 2) -> None:
        super().__init__()
        self.way, self.heads, self.keys = way, heads, keys
        self.qkv = nn.Linear(8, 2 * (heads + 2 * keys))
        self.out = nn.Linear(2 * heads, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([2 * self.heads, 2 * self.keys, 2 * self.keys], -1)
        q, k, v = (part.unflatten(-1, (-1, 2)) for part in (q, k, v))  # (batch, time, heads, 2)
        if self.way == "gqa":
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            return self.out(F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(2))
        k, v = (part.repeat_interleave(self.heads // self.keys, 2) for part in (k, v))
        if self.way == "einsum":
            weights = torch.einsum("bthd,bshd->bhts", q, k).softmax(-1)
            return self.out(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2))
        q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))  # heads in the batch
        heads = torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)
        return self.out(heads.unflatten(0, (-1, self.heads)).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("way", ["gqa", "einsum", "bmm"])
@pytest.mark.parametrize("keys", [1, 2, 4])
def test_fused_and_grouped_heads(way, keys):
    (attention,) = excite.trace(Written(way, keys=keys), torch.randn(2, 3, 8)).attentions
    assert (attention.heads, attention.key_heads) == (4, keys)
    assert attention.groups == tuple(h * keys // 4 for h in range(4))
    assert [one.parameter for one in (attention.query, attention.key, attention.value)] == ["qkv.weight"] * 3
    assert attention.query.index == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert attention.key.index == tuple((8 + 2 * h, 9 + 2 * h) for h in range(keys))
    assert attention.value.index[-1] == (8 + 4 * keys - 2, 8 + 4 * keys - 1)
    assert attention.output.index == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert attention.query.bias == "qkv.bias"
    assert attention.output.bias is None
    assert attention.kernel == ("scaled_dot_product_attention" if way == "gqa" else "softmax")


def test_logits_are_those_of_the_heads():
    torch.manual_seed(0)
    model, x = Heads().double(), torch.randn(2, 3, 8, dtype=torch.float64)
    (attention,) = excite.trace(model, x).attentions
    weights = dict(model.named_parameters())
    q, k = (part.heads(weights[part.parameter]) for part in (attention.query, attention.key))
    split = [p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (model.query, model.key)]
    expected = split[0] @ split[1].mT
    found = torch.einsum("bti,hdi,hdj,bsj->bhts", x, q, k, x)
    assert torch.allclose(found, expected, atol=1e-14)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention(need_weights, batch_first):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2, batch_first=batch_first)

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x, x, x, need_weights=need_weights)[0]

    model = Model()
    (attention,) = excite.trace(model, torch.randn(2, 3, 8)).attentions
    weight = model.attn.in_proj_weight
    for k, part in enumerate((attention.query, attention.key, attention.value)):
        assert torch.equal(part.heads(weight), weight[8 * k : 8 * k + 8].view(2, 4, 8))
        assert part.bias == "attn.in_proj_bias"
    out = model.attn.out_proj.weight
    assert torch.equal(attention.output.heads(out), out.T.reshape(2, 4, 8))
    assert attention.module == "attn"
    assert not attention.cross


def test_encoder_and_decoder_have_names_of_their_own():
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    x = torch.randn(2, 3, 8)
    found = excite.trace(model, {"src": x, "tgt": torch.randn(2, 4, 8)}).attentions
    assert [one.name for one in found] == [
        "encoder layer 0",
        "decoder layer 0, self_attn",
        "decoder layer 0, multihead_attn",
    ]
    assert [one.cross for one in found] == [False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers(family, kernel):
    pytest.importorskip("transformers")
    model, x = transformer(family, kernel, layers=2)
    first, second = excite.trace(model, x, output="logits").attentions
    assert (first.name, second.name) == ("layer 0", "layer 1")
    grouped = family in ("llama", "qwen3")
    assert second.groups == ((0, 0, 1, 1) if grouped else (0, 1, 2, 3))
    assert second.key_heads == (2 if grouped else 4)
    weights = dict(model.named_parameters())
    for part, heads in (
        (second.query, 4),
        (second.key, second.key_heads),
        (second.value, second.key_heads),
        (second.output, 4),
    ):
        assert part.heads(weights[part.parameter]).shape == (heads, 4, 16)
        assert block(part.parameter) == block(second.module)
    assert (second.query.norm is not None) == (family == "qwen3")


def block(path: str) -> str:
    return path.partition(".1.")[0] + ".1"


def test_kernel_that_is_not_understood_is_named():
    @torch.library.custom_op("excite_tests::fused_attention", mutates_args=())
    def fused(q: Tensor) -> Tensor:
        return (q @ q.mT).softmax(-1) @ q

    fused.register_fake(torch.empty_like)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(fused(self.query(x)).mean(1))

    wiring = excite.trace(Model(), torch.randn(2, 3, 8))
    assert not wiring.attentions
    assert "attention of fused_attention cannot be determined: it calls fused_attention" in wiring.notes


def test_projection_that_is_computed_is_not_told():
    model = Heads()
    nn.utils.parametrizations.spectral_norm(model.key)
    (attention,) = excite.trace(model, torch.randn(2, 3, 8)).attentions
    assert attention.key is None
    assert attention.query is not None
    assert attention.heads == 2
    assert attention.output is not None


def test_models_without_attention():
    assert excite.trace(nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1)), torch.zeros(2, 4)).attentions == ()
