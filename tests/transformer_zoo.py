"""Small transformers in float64, with slow and obvious versions of what their attention computes."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, TOKENS, SEQUENCES = 17, 7, 3


class HandAttention(nn.Module):
    """Causal attention by softmax, or by a kernel."""

    def __init__(self, width: int, heads: int, how: str):
        super().__init__()
        self.qkv, self.out, self.heads, self.how = nn.Linear(width, 3 * width), nn.Linear(width, width), heads, how

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if self.how == "kernel":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            y = scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class HandBlock(nn.Module):
    def __init__(self, width: int, heads: int, how: str):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), HandAttention(width, heads, how)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.relu(self.up(self.norm2(x))))


class HandGPT(nn.Module):
    """A GPT in plain PyTorch that returns logits."""

    def __init__(self, how: str = "softmax", layers: int = 2, width: int = 8, heads: int = 2):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(HandBlock(width, heads, how) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Written(nn.Module):
    """Causal attention without biases in one of the forms in which people write it; `calls` holds the logits of every call."""

    def __init__(self, width: int, heads: int, groups: int | None = None):
        super().__init__()
        groups = heads if groups is None else groups
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.calls: list[Tensor] = []

    def attend(self, scores: Tensor) -> Tensor:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        logits = (scores / math.sqrt(self.size)).masked_fill(~allowed, -math.inf)
        self.calls.append(logits.detach())
        return logits.softmax(-1)

    def parts(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values (sequences, tokens, heads, channels)."""
        return [p(x).unflatten(-1, (-1, self.size)) for p in (self.q, self.k, self.v)]


class Einsum(Written):
    """Weights (heads, width, channels) and (heads, channels, width)."""

    def __init__(self, width: int, heads: int):
        super().__init__(width, heads)
        del self.q, self.k, self.v, self.o
        self.q, self.k, self.v = (nn.Parameter(torch.randn(heads, width, width // heads) / 3) for _ in range(3))
        self.o = nn.Parameter(torch.randn(heads, width // heads, width) / 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btc,hcd->bthd", x, w) for w in (self.q, self.k, self.v))
        p = self.attend(torch.einsum("bthd,bshd->bhts", q, k))
        return torch.einsum("bhtd,hdc->btc", torch.einsum("bhts,bshd->bhtd", p, v), self.o)


class Broadcast(Einsum):
    """The same weights, with products that repeat the input for every head."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x[:, None] @ w for w in (self.q, self.k, self.v))
        y = self.attend(q @ k.mT) @ v
        return torch.einsum("bhtd,hdc->btc", y, self.o)


class ComplexRotary(Written):
    """Rotary embeddings by complex numbers, as in Meta's Llama and torchtitan."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        frequencies = 10.0 ** -torch.arange(self.size // 2, dtype=x.dtype)
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequencies
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2)) * turns).flatten(3)
            for t in (q, k)
        )
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.o((self.attend(q @ k.mT) @ v).transpose(1, 2).flatten(2))


class SharedKey(Written):
    """Multi-query attention whose one key head is repeated by the product."""

    def __init__(self, width: int, heads: int):
        super().__init__(width, heads, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.parts(x))
        return self.o((self.attend(q @ k.mT) @ v).transpose(1, 2).flatten(2))


class ModulePerHead(Written):
    """Lists of one layer for each head."""

    def __init__(self, width: int, heads: int):
        super().__init__(width, heads)
        del self.q, self.k, self.v
        self.q, self.k, self.v = (
            nn.ModuleList(nn.Linear(width, self.size, bias=False) for _ in range(heads)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        outputs = [self.attend(q(x) @ k(x).mT) @ v(x) for q, k, v in zip(self.q, self.k, self.v)]
        return self.o(torch.cat(outputs, -1))


class BatchOfHeads(Written):
    """Heads and sequences in one axis, sequences in front, as in OPT and fairseq."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in self.parts(x))
        y = torch.bmm(self.attend(torch.bmm(q, k.mT)), v)
        return self.o(y.unflatten(0, (len(x), -1)).transpose(1, 2).flatten(2))


class HeadsInFront(Written):
    """Heads and sequences in one axis, heads in front."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.permute(2, 0, 1, 3).flatten(0, 1) for t in self.parts(x))
        y = torch.bmm(self.attend(torch.bmm(q, k.mT)), v)
        return self.o(y.unflatten(0, (-1, len(x))).permute(1, 2, 0, 3).flatten(2))


class OneHead(nn.Module):
    def __init__(self, width: int, size: int):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, size, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).mT / math.sqrt(x.shape[-1])
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return scores.masked_fill(~allowed, -math.inf).softmax(-1) @ self.v(x)


class MultiHead(nn.Module):
    """A module for each head, as in Karpathy's tutorial."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = nn.ModuleList(OneHead(width, width // heads) for _ in range(heads))
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.cat([head(x) for head in self.heads], -1))


FORMS = {
    form.__name__: form
    for form in (Einsum, Broadcast, ComplexRotary, SharedKey, ModulePerHead, BatchOfHeads, HeadsInFront)
}


class FormsGPT(nn.Module):
    """A GPT of attention and linear maps, without norms, whose attention is written in one of these forms, or is a `MultiHead`."""

    def __init__(self, form: str, layers: int = 2, width: int = 8, heads: int = 2):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attention": FORMS.get(form, MultiHead)(width, heads), "mlp": nn.Linear(width, width)})
            for _ in range(layers)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block["attention"](x)
            x = x + block["mlp"](x)
        return self.head(x)


@dataclass
class Zoo:
    """A model, its example, and how the naive version finds queries, keys, streams and logits."""

    model: nn.Module
    example: Any
    blocks: list[str]
    attention: list[str]
    causal: bool


def make(name: str) -> Zoo:
    torch.manual_seed(0)
    model, example, blocks, attention, causal = _MAKERS[name]()
    model = model.double()
    with torch.no_grad():
        for p in model.parameters():  # away from zero: logits that differ
            p.add_(0.3 * torch.randn_like(p))
    return Zoo(model.train(), example, blocks, attention, causal)


def _ids() -> Tensor:
    return torch.randint(VOCABULARY, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(1))


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=8, vocab_size=VOCABULARY, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    names = [f"transformer.h.{i}" for i in range(2)]
    return GPT2LMHeadModel(config), _ids(), names, [f"{name}.attn" for name in names], True


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=16, intermediate_size=24,
                         vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0)  # fmt: skip
    names = [f"model.layers.{i}" for i in range(2)]
    return LlamaForCausalLM(config), _ids(), names, [f"{name}.self_attn" for name in names], True


def _bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=8, intermediate_size=16, vocab_size=VOCABULARY
    )
    names = [f"bert.encoder.layer.{i}" for i in range(2)]
    return BertForMaskedLM(config), _ids(), names, [f"{name}.attention.self" for name in names], False


def _vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_size=8,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
        num_labels=3,
    )
    pixels = torch.randn(SEQUENCES, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model = ViTForImageClassification(config)
    names = [path for path, module in model.named_modules() if type(module).__name__ == "ViTLayer"]
    attention = [
        path for path, module in model.named_modules() if type(module).__name__ in ("ViTSelfAttention", "ViTAttention")
    ]
    attention = [name for name in attention if not any(other.startswith(f"{name}.") for other in attention)]
    return model, pixels, names, attention, False


def _hand(how: str) -> Any:
    names = ["blocks.0", "blocks.1"]
    return HandGPT(how), _ids(), names, [f"{name}.attention" for name in names], True


_MAKERS: dict[str, Any] = {
    "gpt2": _gpt2, "llama": _llama, "bert": _bert, "vit": _vit, "softmax": lambda: _hand("softmax"), "kernel": lambda: _hand("kernel"),
}  # fmt: skip
NAMES = list(_MAKERS)


def captured(model: nn.Module, paths: list[str], example: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Inputs and outputs of modules in evaluation mode, and the output of the model."""
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    modules = dict(model.named_modules())
    handles = []
    for path in paths:

        def keep(module: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            inputs[path] = args[0] if args else kwargs["hidden_states"]
            outputs[path] = output[0] if isinstance(output, tuple) else output

        handles.append(modules[path].register_forward_hook(keep, with_kwargs=True))
    training = model.training
    model.eval()
    with torch.no_grad():
        returned = model(**example) if isinstance(example, dict) else model(example)
    model.train(training)
    for handle in handles:
        handle.remove()
    return inputs, outputs, returned


def queries_and_keys(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """(sequences, heads, tokens, width) of queries and of the keys of every query head, from the input of an attention module."""
    class_name = type(module).__name__
    if class_name == "GPT2Attention":
        q, k, _ = module.c_attn(x).split(module.embed_dim, -1)
        heads, groups = module.num_heads, module.num_heads
    elif class_name == "HandAttention":
        q, k, _ = module.qkv(x).chunk(3, -1)
        heads, groups = module.heads, module.heads
    elif class_name == "LlamaAttention":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, rotate_half

        heads, groups = module.config.num_attention_heads, module.config.num_key_value_heads
        q, k = (
            p(x).unflatten(-1, (n, -1)).transpose(1, 2) for p, n in ((module.q_proj, heads), (module.k_proj, groups))
        )
        cos, sin = LlamaRotaryEmbedding(module.config)(x, torch.arange(x.shape[1])[None])
        q, k = (entry * cos[:, None] + rotate_half(entry) * sin[:, None] for entry in (q, k))
        return q, torch.stack([k[:, i * groups // heads] for i in range(heads)], 1)
    else:
        q, k = (
            (getattr(module, a) if hasattr(module, a) else getattr(module, b))(x)
            for a, b in (("query", "q_proj"), ("key", "k_proj"))
        )
        heads = (
            module.num_attention_heads if hasattr(module, "num_attention_heads") else module.config.num_attention_heads
        )
    return tuple(entry.unflatten(-1, (heads, -1)).transpose(1, 2) for entry in (q, k))  # type: ignore[return-value]


def slow_stream_signs(x: Tensor) -> dict[str, float]:
    """Root mean square, largest entry and kurtosis over all entries, in plain Python."""
    entries = x.double().flatten().tolist()
    mean = sum(entries) / len(entries)
    second = sum((entry - mean) ** 2 for entry in entries) / len(entries)
    fourth = sum((entry - mean) ** 4 for entry in entries) / len(entries)
    return {
        "rms": (sum(entry**2 for entry in entries) / len(entries)) ** 0.5,
        "largest": max(map(abs, entries)),
        "kurtosis": fourth / second**2,
    }
