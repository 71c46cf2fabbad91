"""The state of a training with full tensors, as one process has it, whatever the number of processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from excite.runs.state import flatten, unflatten
from excite.train.distributed.processes import Processes


def full_state(tree: Any, on_this_rank: bool) -> Any:
    """The tree with its shards put together, in the same order in every process; where not `on_this_rank`, without their values."""
    if isinstance(tree, Tensor):
        shards = getattr(tree, "full_tensor", None)  # of a DTensor, as FSDP has them
        if shards is None:
            return tree
        full = shards().detach()
        return full.cpu() if on_this_rank else None
    if isinstance(tree, Mapping):
        return {key: full_state(value, on_this_rank) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(full_state(value, on_this_rank) for value in tree)
    return tree


def shard_like(pattern: Any, tree: Any) -> Any:
    """The tree with every tensor cut as the one in the same place of `pattern` is."""
    if isinstance(tree, Tensor):
        return _cut(tree, pattern) if isinstance(pattern, Tensor) else tree
    if isinstance(tree, Mapping) and isinstance(pattern, Mapping):
        return {key: shard_like(pattern.get(key), value) for key, value in tree.items()}
    if isinstance(tree, list | tuple) and isinstance(pattern, list | tuple) and len(tree) == len(pattern):
        return type(tree)(map(shard_like, pattern, tree))
    return tree


def shard_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an optimizer with momenta and the like cut as their parameters are."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {
        number: {key: _cut(value, parameters[number]) for key, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": moments}


def broadcast_state(ranks: Processes, state: Any) -> Any:
    """The state that the first process has read, in all processes; tensors are on the CPU."""
    tensors, structure = flatten(state) if ranks.first else ({}, "")
    header: list[Any] = [structure, [(name, t.shape, t.dtype) for name, t in tensors.items()]]
    dist.broadcast_object_list(header, 0)
    structure, shapes = header
    for name, shape, dtype in shapes:
        tensor = tensors[name].contiguous() if ranks.first else torch.empty(shape, dtype=dtype)
        raw = tensor.reshape(-1).view(torch.uint8).to(ranks.device)
        if len(raw):
            dist.broadcast(raw, 0)
        tensors[name] = raw.cpu().view(dtype).reshape(shape)
    return unflatten(tensors, structure)


def broadcast_buffers(model: nn.Module) -> None:
    """Every process takes the buffers (running statistics) of the first one."""
    buffers = [buffer for buffer in model.buffers() if buffer.numel()]
    if not buffers:
        return
    raw = torch.cat([buffer.detach().contiguous().reshape(-1).view(torch.uint8) for buffer in buffers])
    dist.broadcast(raw, 0)
    sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
    for buffer, chunk in zip(buffers, raw.split(sizes)):
        buffer.data.copy_(chunk.clone().view(buffer.dtype).reshape(buffer.shape))


def _cut(value: Any, like: Tensor) -> Any:
    """`value`, cut as `like` is, if it is a tensor of that shape."""
    if not isinstance(value, Tensor) or not hasattr(like, "full_tensor") or value.shape != like.shape:
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(value.to(like.device, like.dtype), like.device_mesh, like.placements)
