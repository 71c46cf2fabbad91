"""Where the two halves of a doubled batch lie in a tensor inside the model.

The model runs on the batch twice in a row, (2B, ...). Inside, the batch may stand on another axis (T, 2B, D), or be
folded with others: (2B·T, D) holds the halves one after the other, (T·2B, D) interleaves them T times. Everything that
is kept from the clean pass of B samples (perturbations, dropout masks) has to be laid out the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from excite.errors import ModelError


@dataclass(frozen=True)
class Layout:
    """The axis that holds the batch, and how many times (`outer`) the batch is repeated on it, outermost first."""

    axis: int = 0
    outer: int = 1

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        """Two clean-sized tensors as one of the doubled size."""
        if self.outer == 1:
            return torch.cat([first, second], self.axis)
        shape, n = first.shape, first.shape[self.axis]
        parts = [t.unflatten(self.axis, (self.outer, n // self.outer)) for t in (first, second)]
        doubled = torch.cat(parts, self.axis + 1)
        return doubled.reshape(*shape[: self.axis], 2 * n, *shape[self.axis + 1 :])

    def mirrored(self, first: Tensor) -> Tensor:
        """`first` and its negative, as `join` lays them out, without the negative standing in memory by itself."""
        if self.outer != 1:
            return self.join(first, -first)
        n = first.shape[self.axis]
        last = first.dim() == 4 and first.is_contiguous(memory_format=torch.channels_last)
        doubled = torch.empty(
            [2 * size if axis == self.axis else size for axis, size in enumerate(first.shape)],
            dtype=first.dtype,
            device=first.device,
            memory_format=torch.channels_last if last else torch.contiguous_format,
        )
        doubled.narrow(self.axis, 0, n).copy_(first)
        torch.neg(first, out=doubled.narrow(self.axis, n, n))
        return doubled

    def split(self, doubled: Tensor) -> tuple[Tensor, Tensor]:
        n = doubled.shape[self.axis]
        parts = doubled.unflatten(self.axis, (self.outer, 2, n // (2 * self.outer)))
        first, second = parts.unbind(self.axis + 1)
        return first.flatten(self.axis, self.axis + 1), second.flatten(self.axis, self.axis + 1)

    def by_sample(self, tensor: Tensor, samples: int) -> Tensor:
        """(samples, everything that belongs to one sample); `samples` is B for clean tensors, 2B for doubled ones."""
        n = tensor.shape[self.axis]
        parts: Tensor = tensor.unflatten(self.axis, (self.outer, samples, n // (self.outer * samples)))
        return parts.movedim(self.axis + 1, 0).flatten(1)

    def from_samples(self, rows: Tensor, like: Tensor) -> Tensor:
        """The inverse of `by_sample`."""
        samples, n = rows.shape[0], like.shape[self.axis]
        if not samples:
            return rows.reshape(like.shape)
        before, after = like.shape[: self.axis], like.shape[self.axis + 1 :]
        parts = rows.reshape(samples, *before, self.outer, n // (self.outer * samples), *after)
        return parts.movedim(0, self.axis + 1).reshape(like.shape)


def find_layout(clean: Tensor, doubled: Tensor, batch: int, what: str) -> Layout | None:
    """The layout under which `doubled`, from the batch twice in a row, is `clean` twice.

    None if the tensor does not depend on the batch.
    """
    if clean.shape == doubled.shape:
        return None
    axes = [a for a in range(clean.dim()) if doubled.dim() == clean.dim() and doubled.shape[a] == 2 * clean.shape[a]]
    if len(axes) == 1 and clean.shape[axes[0]] % batch == 0:
        axis = axes[0]
        copies = clean.shape[axis] // batch
        fitting = [Layout(axis, k) for k in range(1, copies + 1) if copies % k == 0]
        if len(fitting) == 1:
            return fitting[0]
        errors = [_distance(layout.join(clean, clean), doubled) for layout in fitting]
        best = min(range(len(fitting)), key=errors.__getitem__)
        if errors[best] <= 1e-3:
            return fitting[best]
    raise ModelError(
        f"cannot tell how samples lie in the input of {what}: shape {tuple(clean.shape)} for a batch of {batch} became "
        f"{tuple(doubled.shape)} for twice that batch; leave that layer out with layers=[...]"
    )


def _distance(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / (b.norm() + 1e-300))
