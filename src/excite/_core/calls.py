"""How a model is called on a batch.

A batch is a tensor, a tuple of positional arguments or a dict of keyword arguments (or the dict that a model takes as its
only argument); the first axis of every tensor in it is the batch axis.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from excite._core.checks import Batch, Pick, batch_size, check_finite, pick_output, tensors
from excite._core.wrappers import unwrap

__all__ = [
    "Batch",
    "Pick",
    "arguments",
    "batch_size",
    "call",
    "check_finite",
    "own_copy",
    "pick_output",
    "repeated",
    "tensors",
]


def call(model: nn.Module, batch: Batch) -> Any:
    """`model(batch)`, `model(*batch)` or `model(**batch)`."""
    args, kwargs = arguments(model, batch)
    return model(*args, **kwargs)


def arguments(model: nn.Module, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of a batch.

    A dict has the keyword arguments, or is the only argument of a model that does not take its keys.
    """
    if isinstance(batch, tuple):
        return batch, {}
    if isinstance(batch, dict) and (_takes(model, **batch) or not _takes(model, batch)):
        return (), batch
    return (batch,), {}


def _takes(model: nn.Module, *args: Any, **kwargs: Any) -> bool:
    try:
        inspect.signature(unwrap(model).forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


def own_copy(batch: Batch) -> Batch:
    """The batch outside any graph and in memory of its own: a model may change its input in place."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, batch)  # type: ignore[no-any-return]


def repeated(batch: Batch, times: int, size: int | None = None) -> Batch:
    """The batch `times` times in a row: (B, ...) becomes (times·B, ...) in every tensor whose first axis is the batch.

    `size` is B, where that is known.
    """
    size = batch_size(batch) if size is None else size

    def repeat(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size:
            return torch.cat([leaf] * times)
        return leaf

    return tree_map(repeat, batch)  # type: ignore[no-any-return]
