"""Augmented data: images flipped and shifted at random, anew in every batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from excite.errors import InputError


def augmented(x: Tensor, flip: bool = True, shift: int = 4) -> Tensor:
    """Images (B, C, H, W), each flipped left to right with probability ½ and moved by up to `shift` pixels either way.

    What moves in from outside repeats the pixels of the edge, so that values stay within the bounds of the data. Draws
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
