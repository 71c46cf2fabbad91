"""One computation for the tensors of several layers: a few kernels for all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Name = TypeVar("Name", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)
ENTRIES = 1 << 26  # held at once


class Together(Generic[Name, Key]):
    """Collects tensors, and applies a function to all of one shape and key at once.

    Launching many small kernels from Python takes longer than they run: here one launch is for all layers.

    Args:
        function: Of a key and stacks (count, ...) of the tensors that were added with it; returns stacks (count, ...).
        entries: Number of entries that are held at most, beyond those of one item; when there are more, they are computed early.

    Example:
        >>> import torch
        >>> from excite._core.intercept.together import Together
        >>> sums = Together(lambda key, x: (x.sum(-1),))
        >>> sums.add("a", torch.ones(2))
        >>> sums.add("b", torch.zeros(2))
        >>> {name: float(result) for name, (result,) in sums.finish().items()}
        {'a': 2.0, 'b': 0.0}
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], entries: int = ENTRIES):
        self._function, self._limit = function, entries
        self._groups: dict[tuple[object, ...], tuple[Key | None, list[tuple[Name, tuple[Tensor, ...]]]]] = {}
        self._entries = 0
        self._names: list[Name] = []
        self._results: dict[Name, tuple[Tensor, ...]] = {}

    def add(self, name: Name, *tensors: Tensor, key: Key | None = None, entries: int | None = None) -> None:
        """Adds the tensors of one item, which must not change until `finish`.

        Args:
            name: Name of the item, each once.
            *tensors: What the function is applied to.
            key: Items with different keys are computed apart.
            entries: Number of entries that the computation needs; that of the tensors by default.
        """
        count = sum(tensor.numel() for tensor in tensors) if entries is None else entries
        if self._entries and self._entries + count > self._limit:
            self._compute()
        group = (key, *((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors))
        self._groups.setdefault(group, (key, []))[1].append((name, tensors))
        self._names.append(name)
        self._entries += count

    def finish(self) -> dict[Name, tuple[Tensor, ...]]:
        """The results of every item by name, in the order they were added."""
        self._compute()
        return {name: self._results[name] for name in self._names}

    def _compute(self) -> None:
        for key, items in self._groups.values():
            columns = zip(*(tensors for _, tensors in items))
            stacks = [column[0][None] if len(column) == 1 else torch.stack(column) for column in columns]
            results = zip(*(stack.unbind() for stack in self._function(key, *stacks)))
            self._results |= dict(zip((name for name, _ in items), results))
        self._groups, self._entries = {}, 0
