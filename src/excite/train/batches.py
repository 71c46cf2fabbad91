"""Batches of a training: the order of the points, and random changes of images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from excite._core.randomness import stream
from excite.errors import InputError


class Shuffle:
    """Batches of indices, in a new order each epoch, from a generator of its own.

    A checkpoint keeps the state of the generator at the start of the epoch: with it the order is drawn again, and the
    batches already done are skipped.
    """

    def __init__(self, points: int, batch: int, seed: int) -> None:
        self._points, self._batch = points, batch
        self._generator = torch.Generator().manual_seed(stream(seed, 2))
        self._start = self._generator.get_state()

    def epoch(self, device: torch.device) -> list[Tensor]:
        """The batches of the next epoch, on `device`; the last one may be smaller."""
        return list(self.order().to(device).split(self._batch))

    def order(self) -> Tensor:
        """The points of the next epoch, in their order."""
        self._start = self._generator.get_state()
        return torch.randperm(self._points, generator=self._generator)

    def state_dict(self, *, between: bool) -> dict[str, Any]:
        """`between` epochs the next order is not drawn yet; else the current one has to be drawn again."""
        return {"generator": self._generator.get_state() if between else self._start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state of the generator."""
        self._generator.set_state(state["generator"])


def augmented(x: Tensor, flip: bool = True, shift: int = 4) -> Tensor:
    """Images (B, C, H, W), each flipped left to right with probability ½ and moved by up to `shift` pixels either way.

    Pixels shifted in from outside repeat the edge, so that values stay within the bounds of the data. Draws
    from torch's global random state on the CPU: inside `fit` that is the training's own, and checkpoints keep it.
    """
    if x.dim() != 4:
        raise InputError(f"augment: expected images of shape (B, C, H, W); got {tuple(x.shape)}")
    if flip:
        x = torch.where((torch.rand(len(x)) < 0.5).to(x.device)[:, None, None, None], x.flip(-1), x)
    if shift:
        height, width = x.shape[2:]
        offsets = torch.randint(2 * shift + 1, (2, len(x), 1)).to(x.device)
        rows = offsets[0] + torch.arange(height, device=x.device)  # (B, H)
        columns = offsets[1] + torch.arange(width, device=x.device)  # (B, W)
        padded = functional.pad(x, (shift,) * 4, mode="replicate")
        image = torch.arange(len(x), device=x.device)[:, None, None]
        x = padded[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
    return x
