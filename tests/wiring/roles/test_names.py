"""Names by role, and names of laws by head."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import excite
from excite.wiring.groups import named, named_by_number
from models import Heads, transformer


class Block(nn.Module):
    """A block of a decoder with a fused projection and a gated or plain MLP."""

    def __init__(self, gated: str = "") -> None:
        super().__init__()
        self.gated = gated
        self.norm1, self.norm2 = nn.RMSNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.gate, self.down = nn.Linear(8, 24 if gated == "fused" else 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)]
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        h = self.up(self.norm2(x))
        if self.gated == "fused":
            h, gate = h.chunk(2, -1)
            return x + self.down(F.silu(gate) * h)
        if self.gated:
            return x + self.down(F.silu(self.gate(self.norm2(x))) * h)
        return x + self.down(h if isinstance(self.up, Experts) else new_gelu(h))


def new_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


class Decoder(nn.Module):
    def __init__(self, tied: bool = False, gated: str = "") -> None:
        super().__init__()
        self.tok_embed, self.pos_embed = nn.Embedding(11, 8), nn.Embedding(4, 8)
        self.blocks = nn.ModuleList([Block(gated), Block(gated)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.tok_embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok_embed(x) + self.pos_embed(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


TOKENS = torch.arange(8).view(2, 4)


def test_roles_of_a_decoder():
    wiring = excite.trace(Decoder(gated="yes"), TOKENS)
    assert {layer.name: layer.role for layer in wiring.layers if "1" in layer.name or "." not in layer.name} == {
        "blocks.1.qkv": "layer 1, query, key and value",
        "blocks.1.out": "layer 1, output",
        "blocks.1.up": "layer 1, MLP in",
        "blocks.1.gate": "layer 1, MLP gate",
        "blocks.1.down": "layer 1, MLP out",
        "head": "output",
    }
    roles = {site.parameter: site.role for group in wiring.groups for site in (*group.producers, *group.consumers)}
    assert roles["tok_embed.weight"] == "token embedding"
    assert roles["pos_embed.weight"] == "position embedding"
    assert roles["blocks.1.norm1.weight"] == "layer 1, norm before attention"
    assert roles["blocks.1.norm2.weight"] == "layer 1, norm before MLP"
    assert roles["norm.weight"] == "final norm"


def test_fused_gate_and_tied_embedding():
    wiring = excite.trace(Decoder(tied=True, gated="fused"), TOKENS)
    roles = {layer.name: layer.role for layer in wiring.layers}
    assert roles["blocks.0.up"] == "layer 0, MLP in and gate"
    assert roles["blocks.0.down"] == "layer 0, MLP out"
    assert roles[wiring.layers[-1].name] == "token embedding, tied to the output"


def test_laws_of_heads_have_their_names():
    groups = excite.trace(Decoder(), TOKENS).groups
    laws = {name: group.role for name, group in named(groups) if "blocks.1.qkv" in name}
    assert laws == {
        f"blocks.1.qkv/{part}/head{head}": f"layer 1, head {head}, {part}"
        for part in ("query", "value")
        for head in (0, 1)
    }
    assert [name for name in named_by_number(groups) if "blocks.1.qkv" in name] == [
        "blocks.1.qkv",
        "blocks.1.qkv#2",
        "blocks.1.qkv#3",
        "blocks.1.qkv#4",
    ]


def test_separate_projections():
    names = [name for name, _ in named(excite.trace(Heads(), torch.randn(2, 3, 8)).groups)]
    assert names[:4] == ["query/head0", "query/head1", "value/head0", "value/head1"]


def test_activation_is_named_as_written():
    groups = excite.trace(Decoder(), TOKENS).groups
    (why,) = (group.why for group in groups if group.producers[0].layer == "blocks.1.up")
    assert why == "new_gelu between blocks.1.up and blocks.1.down is not positively homogeneous"


class Experts(nn.Module):
    """A mixture of experts that are all computed; the largest weight counts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3, bias=False)
        layers = ({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)} for _ in range(3))
        self.experts = nn.ModuleList(nn.ModuleDict(pair) for pair in layers)

    def forward(self, x: Tensor) -> Tensor:
        p = self.router(x).softmax(-1)
        weights = p * F.one_hot(p.argmax(-1), 3)
        outputs = [expert["down"](F.gelu(expert["up"](x))) for expert in self.experts]
        return sum((weights[..., i : i + 1] * y for i, y in enumerate(outputs)), torch.zeros(()))


def test_experts_have_numbers():
    model = Decoder()
    model.blocks[1].up, model.blocks[1].down = Experts(), nn.Identity()
    model.blocks[1].gate = nn.Identity()
    roles = excite.trace(model, TOKENS).roles
    assert roles["blocks.1.up.router"] == "layer 1, router"
    assert [roles[f"blocks.1.up.experts.2.{name}"] for name in ("up", "down")] == [
        "layer 1, expert 2, MLP in",
        "layer 1, expert 2, MLP out",
    ]


def test_what_the_last_block_adds_is_named_by_its_block():
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    wiring = excite.trace(model, {"src": torch.randn(2, 3, 8), "tgt": torch.randn(2, 4, 8)})
    roles = {layer.name: layer.role for layer in wiring.layers}
    assert roles["decoder.layers.0.self_attn.out_proj"] == "decoder layer 0, self_attn, output"
    assert roles["decoder.layers.0.linear2"] == "decoder layer 0, MLP out"


def test_printed_roles():
    text = str(excite.trace(Decoder(), TOKENS))
    assert "layer 1, query, key and value" in text
    assert max(map(len, text.splitlines())) <= 100


def test_models_without_attention_have_no_roles():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    assert {layer.role for layer in excite.trace(model, torch.zeros(2, 4)).layers} == {""}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("gpt2", ["query, key and value", "output", "MLP in", "MLP out"]),
        ("llama", ["query", "key", "value", "output", "MLP gate", "MLP in", "MLP out"]),
        ("qwen3", ["query", "key", "value", "output", "MLP gate", "MLP in", "MLP out"]),
        ("bert", ["query", "key", "value", "output", "MLP in", "MLP out"]),
        ("vit", ["query", "key", "value", "output", "MLP in", "MLP out"]),
    ],
)
def test_roles_of_transformers(family, expected):
    pytest.importorskip("transformers")
    model, x = transformer(family, layers=2)
    roles = [layer.role for layer in excite.trace(model, x, output="logits").layers]
    assert [role for role in roles if role.startswith("layer 1, ")] == [f"layer 1, {part}" for part in expected]
    assert (roles[0] == "patch embedding") == (family == "vit")
