"""Made-up images for tests of trainings image by image."""

from __future__ import annotations

import torch
from torch import Tensor

RATE = 0.05


def images(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 3, 32, 32, generator=generator, dtype=torch.float64) * 2 - 1
    return x, torch.randint(2, (count,), generator=generator).double()
