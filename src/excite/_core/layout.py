"""Where the two halves of a doubled batch lie in a tensor inside the model.

The model runs on the batch twice in a row, (2B, ...). Inside, the batch may stand on another axis (T, 2B, D), or be
folded with others: (2B·T, D) holds the halves one after the other, (T·2B, D) interleaves them T times. Everything that
is kept from the clean pass of B samples (perturbations, dropout masks) has to be laid out the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from excite.errors import ModelError

_ROUNDING = 1e-3  # relative; kernels for another size of batch sum in another order


@dataclass(frozen=True)
class Layout:
    """The axis that holds the batch, and how many times (`outer`) the batch is repeated on it, outermost first.

    `tokens`: into how many equal parts, one after the other, each sample is divided by `rows`.
    """

    axis: int = 0
    outer: int = 1
    tokens: int = 1

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        """Two clean-sized tensors as one of the doubled size."""
        if self.outer == 1:
            return torch.cat([first, second], self.axis)
        shape, n = first.shape, first.shape[self.axis]
        halves = [t.unflatten(self.axis, (self.outer, n // self.outer)) for t in (first, second)]
        doubled = torch.cat(halves, self.axis + 1)
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
        halves = doubled.unflatten(self.axis, (self.outer, 2, n // (2 * self.outer)))
        first, second = halves.unbind(self.axis + 1)
        return first.flatten(self.axis, self.axis + 1), second.flatten(self.axis, self.axis + 1)

    def by_sample(self, tensor: Tensor, samples: int) -> Tensor:
        """(samples, everything that belongs to one sample); `samples` is B for clean tensors, 2B for doubled ones."""
        n = tensor.shape[self.axis]
        unfolded: Tensor = tensor.unflatten(self.axis, (self.outer, samples, n // (self.outer * samples)))
        return unfolded.movedim(self.axis + 1, 0).flatten(1)

    def rows(self, tensor: Tensor, samples: int) -> Tensor:
        """(samples · tokens, everything that belongs to one token of one sample)."""
        rows = self.by_sample(tensor, samples)
        return rows if self.tokens == 1 else rows.reshape(samples * self.tokens, -1)

    def from_rows(self, rows: Tensor, like: Tensor) -> Tensor:
        """The inverse of `rows`."""
        return self.from_samples(rows if self.tokens == 1 else rows.reshape(len(rows) // self.tokens, -1), like)

    def by_token(self, shape: Sequence[int], samples: int, tokens: int, what: str) -> Layout:
        """The same layout, whose rows are tokens: they must lie on the axis after the batch, or be folded into it."""
        n = shape[self.axis]
        inside = [*shape[: self.axis], self.outer, n // (self.outer * samples), *shape[self.axis + 1 :]]
        if next((size for size in inside if size != 1), 1) != tokens:
            raise ModelError(
                f"{what}: cannot determine where its {tokens} tokens lie in shape {tuple(shape)}; expected (batch, tokens, ...); leave it out "
                "with layers=[...]"
            )
        return replace(self, tokens=tokens)

    def from_samples(self, rows: Tensor, like: Tensor) -> Tensor:
        """The inverse of `by_sample`."""
        samples, n = rows.shape[0], like.shape[self.axis]
        if not samples:
            return rows.reshape(like.shape)
        before, after = like.shape[: self.axis], like.shape[self.axis + 1 :]
        unfolded = rows.reshape(samples, *before, self.outer, n // (self.outer * samples), *after)
        return unfolded.movedim(0, self.axis + 1).reshape(like.shape)


def find_layout(clean: Tensor, doubled: Tensor, batch: int, what: str) -> Layout | None:
    """The layout under which `doubled`, from the batch twice in a row, is `clean` twice.

    None if the tensor does not depend on the batch. Where several layouts fit, as for samples that are equal, the best.
    """
    fitting = fitting_layouts(clean, doubled, batch, what)
    return fitting[0] if fitting else None


def fitting_layouts(clean: Tensor, doubled: Tensor, batch: int, what: str, *, strict: bool = True) -> list[Layout]:
    """All layouts under which `doubled` is `clean` twice, the best first; none if the tensor does not depend on the batch.

    Raises ModelError where there is no such layout; unless `strict`, all that the shapes allow count then.
    """
    possible = possible_layouts(clean.shape, doubled.shape, batch)
    if clean.shape == doubled.shape or len(possible) == 1:
        return possible
    fitting = closest(possible, clean, doubled) or ([] if strict else possible)
    if fitting:
        return fitting
    raise ModelError(
        f"cannot tell how samples lie in the input of {what}: shape {tuple(clean.shape)} for a batch of {batch} became "
        f"{tuple(doubled.shape)} for twice that batch; leave that layer out with layers=[...]"
    )


def possible_layouts(clean: Sequence[int], doubled: Sequence[int], batch: int) -> list[Layout]:
    """Those that the shapes allow."""
    axes = [a for a, n in enumerate(clean) if len(doubled) == len(clean) and doubled[a] == 2 * n]
    if len(axes) != 1 or clean[axes[0]] % batch:
        return []
    copies = clean[axes[0]] // batch
    return [Layout(axes[0], k) for k in range(1, copies + 1) if copies % k == 0]


def closest(possible: Sequence[Layout], clean: Tensor, doubled: Tensor) -> list[Layout]:
    """The layouts under which `doubled` is `clean` twice but for rounding, the best first."""
    errors = [_distance(layout.join(clean, clean), doubled) for layout in possible]
    fitting = [i for i, error in enumerate(errors) if error <= _ROUNDING]
    return [possible[i] for i in sorted(fitting, key=errors.__getitem__)]


def _distance(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / (b.norm() + 1e-300))
