"""What is taken over the batch, where several processes have a part of it each."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from excite.excitation.radius import root_mean_square


def gathered(rows: Tensor) -> Tensor:
    """The rows (B, ...) of all processes, in their order; B may differ. Every process has to call this."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return rows
    counts = [torch.zeros((), dtype=torch.int64, device=rows.device) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor(len(rows), device=rows.device))
    numbers = [int(count) for count in counts]
    padded = rows.new_zeros((max(numbers), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in numbers]
    dist.all_gather(parts, padded)
    return torch.cat([part[:number] for part, number in zip(parts, numbers)])


def common_root_mean_square(input: Tensor) -> Tensor:
    """`root_mean_square` of the inputs of all processes together. Every process has to call this."""
    own = root_mean_square(input)
    sums = torch.stack([own.square() * input.numel(), torch.full_like(own, input.numel())])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).sqrt()


def anyone(true: bool, device: torch.device) -> bool:
    """Whether it is true in any process. Every process has to call this."""
    flag = torch.tensor(int(true), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
