"""One value out of the values of all processes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from excite.probes.protocol import Reduction


def rank_and_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def reduce(values: Mapping[str, float], reduction: Reduction, device: torch.device) -> dict[str, float]:
    """The same on every process: mean, sum, max or min over processes, or the value of the first one.

    Every process has to come with the same names.
    """
    _, size = rank_and_size()
    if size == 1 or not values:
        return dict(values)
    names = sorted(values)
    tensor = torch.tensor([values[name] for name in names], dtype=torch.float64, device=device)
    if reduction == "first":
        dist.broadcast(tensor, 0)
    else:
        operations = {
            "mean": dist.ReduceOp.SUM,
            "sum": dist.ReduceOp.SUM,
            "max": dist.ReduceOp.MAX,
            "min": dist.ReduceOp.MIN,
        }
        dist.all_reduce(tensor, operations[reduction])
        if reduction == "mean":
            tensor /= size
    return dict(zip(names, tensor.tolist()))
