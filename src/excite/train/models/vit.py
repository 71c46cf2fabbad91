"""A small vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from excite._core.checks import check_count
from excite.errors import InputError


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each behind a layer normalization and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens of the same shape, (B, T, width)."""
        samples, tokens, width = x.shape
        stacked = self.queries_keys_values(self.norm1(x)).view(samples, tokens, 3, self.heads, width // self.heads)
        queries, keys, values = stacked.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values)
        x = x + self.out(attended.transpose(1, 2).reshape(samples, tokens, width))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class VisionTransformer(nn.Module):
    """Patches as tokens with learned positions, blocks, the mean over tokens, a linear layer."""

    def __init__(self, channels: int, size: int, outputs: int, patch: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(channels, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Returns outputs of shape (B, outputs)."""
        tokens = self.embedding(x).flatten(2).transpose(1, 2) + self.positions
        outputs: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return outputs


def vit(
    channels: int = 3, size: int = 32, outputs: int = 1, patch: int = 4, width: int = 192, depth: int = 12, heads: int = 3
) -> nn.Module:  # fmt: skip
    """A vision transformer for small square images; the default sizes are ViT-tiny's with patches of 4×4, 5.4 million weights."""
    for name, number in {"patch": patch, "width": width, "depth": depth, "heads": heads, "size": size}.items():
        check_count(number, f"vit: {name}")
    if size % patch:
        raise InputError(f"vit: expected a patch that divides the size of the images, {size}; got patch={patch}")
    if width % heads:
        raise InputError(f"vit: expected a width that is a multiple of heads={heads}; got width={width}")
    return VisionTransformer(channels, size, outputs, patch, width, depth, heads)
