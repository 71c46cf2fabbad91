"""A small GPT: the decoder of the studies on language models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GPT(nn.Module):
    """A decoder with learned positions, pre-normalization and untied embeddings; logits (B, T, vocabulary) for ids (B, T).

    Args:
        vocabulary: Number of tokens.
        width: Size of the residual stream.
        depth: Number of blocks.
        heads: Heads per block.
        context: Largest number of positions.
        qk_norm: Whether each head's queries and keys are normalized (RMSNorm) before their product.

    Example:
        >>> from excite.train.models.gpt import GPT
        >>> GPT(256, width=32, depth=2, heads=2, context=16)(torch.zeros(3, 16, dtype=torch.long)).shape
        torch.Size([3, 16, 256])
    """

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, context: int, qk_norm: bool = False):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, qk_norm) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        for path, weight in self.named_parameters():
            if path.endswith(
                ("attention.out.weight", "down.weight")
            ):  # the residual stream keeps its size over depth (GPT-2)
                nn.init.normal_(weight, std=0.02 / (2 * depth) ** 0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class GPTBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, qk_norm: bool):
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = CausalAttention(width, heads, qk_norm)
        self.before_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream after the block."""
        x = x + self.attention(self.before_attention(x))
        added: Tensor = self.down(F.gelu(self.up(self.before_mlp(x))))
        return x + added


class CausalAttention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, width: int, heads: int, qk_norm: bool):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.query_norm = nn.RMSNorm(width // heads) if qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(width // heads) if qk_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Inputs of the heads, (B, T, width)."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, heads, T, size) each
        read = F.scaled_dot_product_attention(self.query_norm(q), self.key_norm(k), v, is_causal=True)
        mixed: Tensor = self.out(read.transpose(1, 2).flatten(2))
        return mixed
