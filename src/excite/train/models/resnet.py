"""Residual networks with batch normalization for small images."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from excite._core.checks import check_count


class Block(nn.Module):
    """Residual block: relu(norm(conv(relu(norm(conv(x))))) + skip(x))."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.skip = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the sum of the skip connection and the two convolutions, after a ReLU."""
        inner = self.norm2(self.second(functional.relu(self.norm1(self.first(x)))))
        return functional.relu(inner + self.skip(x))


def resnet(channels: int = 3, outputs: int = 1, width: int = 64, stages: int = 3, blocks: int = 2) -> nn.Module:
    """Stages of `blocks` residual blocks, each stage twice as wide and half as large as the one before, then the mean.

    Three stages from width 64 have 2.8 million weights; four are ResNet-18 as it is used on 32×32 images.
    """
    for name, number in {"width": width, "stages": stages, "blocks": blocks}.items():
        check_count(number, f"resnet: {name}")
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for stage in range(stages):
        after = width * 2**stage
        before = after if stage == 0 else after // 2
        layers += [Block(before, after, 1 if stage == 0 else 2)]
        layers += [Block(after, after, 1) for _ in range(blocks - 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(after, outputs))


class PreActBlock(nn.Module):
    """Residual block with normalization and ReLU in front of each convolution (He et al., 2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(before)
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.skip = nn.Conv2d(before, after, 1, stride, bias=False) if stride != 1 or before != after else None

    def forward(self, x: Tensor) -> Tensor:
        """Returns the sum of the skip connection and the two convolutions."""
        h = functional.relu(self.norm1(x))
        skip = x if self.skip is None else self.skip(h)
        inner: Tensor = self.second(functional.relu(self.norm2(self.first(h))))
        return inner + skip


def preact_resnet(channels: int = 3, outputs: int = 1, width: int = 64, stages: int = 4, blocks: int = 2) -> nn.Module:
    """As `resnet`, with pre-activation blocks: four stages of two are PreActResNet-18, 11 million weights."""
    for name, number in {"width": width, "stages": stages, "blocks": blocks}.items():
        check_count(number, f"preact-resnet: {name}")
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, 1, 1, bias=False)]
    for stage in range(stages):
        after = width * 2**stage
        before = after if stage == 0 else after // 2
        layers += [PreActBlock(before, after, 1 if stage == 0 else 2)]
        layers += [PreActBlock(after, after, 1) for _ in range(blocks - 1)]
    head = [nn.BatchNorm2d(after), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(after, outputs)]
    return nn.Sequential(*layers, *head)
