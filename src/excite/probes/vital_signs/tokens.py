"""Which tokens of a sample count: padding, and places at even distances in long sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from excite._core.calls import Batch

PLACES = 128  # of a sequence, at which attention, the output and ranks of tokens are measured


def even_places(count: int, max_places: int = PLACES, device: torch.device | None = None) -> Tensor | None:
    """At most `max_places` places out of `count`, at even distances from the first to the last; None for all of them.

    Args:
        count: Number of places.
        max_places: How many to take; at least 2.
        device: Where the result is made. Nothing is sent to it.

    Example:
        >>> from excite.probes.vital_signs.tokens import even_places
        >>> even_places(9, 3).tolist()
        [0, 4, 8]
    """
    if count <= max_places:
        return None
    places: Tensor = (torch.arange(max_places, device=device) * (count - 1) + (max_places - 1) // 2) // (max_places - 1)
    return places


def at_places(x: Tensor, places: Tensor | None, dim: int) -> Tensor:
    """The entries of `x` at some places of an axis; all of them for None, and for an axis that is expanded from one entry."""
    return x if places is None or x.shape[dim] == 1 else x.index_select(dim, places.to(x.device))


def token_mask(example: Batch) -> Tensor | None:
    """The attention mask (sequences, tokens) of a tokenizer, if the example is a dict that has one."""
    mask = example.get("attention_mask") if isinstance(example, dict) else None
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def wide(x: Tensor) -> Tensor:
    """In float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
