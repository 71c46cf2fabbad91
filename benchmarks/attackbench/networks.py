"""The four ResNet-18s of the benchmark: trained plainly, adversarially, with every layer excited, and with masked gradients.

Residual networks with four stages of two blocks for 32×32 images (`excite.train.models.resnet`), 32 channels in the first stage
unless another width is given, ten classes, pixels from 0 to 1. Trained for a few epochs: they are there to be attacked.
"""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excite._core.randomness import seeded_weights
from excite.excitation import AdversarialTraining
from excite.train.cuda_graph import CapturedStep
from excite.train.models.resnet import resnet

RADIUS = 8 / 255
RATES = (0.05, 0.2, 0.2, 0.15, 0.1, 0.06, 0.03, 0.01, 0.003)  # learning rates, for equal parts of a training
KINDS = ("plain", "pgd", "excited", "masked")
WORDS = {
    "plain": "cross-entropy",
    "pgd": "PGD training, five steps, 8/255",
    "excited": "PGD training with every layer excited, hidden radius 0.003",
    "masked": "k-winners-take-all activations (the largest tenth of each layer), cross-entropy",
}


class Pixels(nn.Module):
    """Pixels from 0 to 1 as inputs of mean about zero and standard deviation about one."""

    def forward(self, x: Tensor) -> Tensor:
        return 4 * x - 2


class KWinners(nn.Module):
    """Keeps the largest `fraction` of the units of a sample and sets the others to zero (Xiao, Zhong, Zheng, ICLR 2020)."""

    def __init__(self, fraction: float = 0.1) -> None:
        super().__init__()
        self.fraction = fraction

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        count = max(1, math.ceil(self.fraction * flat.shape[1]))
        least = flat.detach().topk(count, dim=1, sorted=False).values.amin(1)
        return x * (x >= least.reshape(-1, *[1] * (x.dim() - 1)))


class WinnersBlock(nn.Module):
    """A residual block whose two ReLUs are k-winners-take-all."""

    def __init__(self, block: nn.Module, fraction: float) -> None:
        super().__init__()
        self.block, self.first, self.second = block, KWinners(fraction), KWinners(fraction)

    def forward(self, x: Tensor) -> Tensor:
        block = self.block
        inner = block.norm2(block.second(self.first(block.norm1(block.first(x)))))
        return self.second(inner + block.skip(x))


def make_network(kind: str, width: int = 32, seed: int = 0) -> nn.Module:
    """The network of one kind, with random weights."""
    with seeded_weights(seed):
        model = resnet(3, 10, width=width, stages=4)
    if kind == "masked":
        layers = [
            WinnersBlock(m, 0.1) if hasattr(m, "norm2") else KWinners(0.1) if isinstance(m, nn.ReLU) else m
            for m in model
        ]
        model = nn.Sequential(*layers)
    return nn.Sequential(Pixels(), model)


def read_images(data: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """CIFAR-10: training images and labels, test images and labels. `data`: a folder, or an .npz file of bytes."""
    if data is not None and data.endswith(".npz"):
        stored = np.load(data)
        x, x_test = (torch.from_numpy(stored[name]).float() / 255 for name in ("x_train", "x_test"))
        y, y_test = (torch.from_numpy(stored[name].astype(np.int64)) for name in ("y_train", "y_test"))
        return x, y, x_test, y_test
    from excite.data import load

    found = load("cifar10", root=data, scale=(0, 1))
    return found.x_train, found.y_train, found.x_test, found.y_test


def train(
    kind: str,
    x: Tensor,
    y: Tensor,
    *,
    width: int = 32,
    epochs: float,
    seconds: float = math.inf,
    batch: int = 256,
    seed: int = 0,
) -> nn.Module:
    """Trains one network where x lies, with flips and shifts and SGD, until `epochs` or `seconds` have passed.

    The learning rate follows whichever runs out first, so that a busy machine trains less instead of not at all. It changes in
    stages, since every change captures the step again on a GPU.
    """
    device = x.device
    torch.manual_seed(seed)
    model = make_network(kind, width, seed).to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), RATES[0], momentum=0.9, weight_decay=5e-4, nesterov=True)
    method = AdversarialTraining(
        model, RADIUS if kind in ("pgd", "excited") else 0.0, steps=5, classes=10, loss="cross-entropy", bounds=(0, 1),
        hidden_radius=0.003 if kind == "excited" else 0.0,
    )  # fmt: skip
    loss = partial(_adversarial if kind in ("pgd", "excited") else _plain, method, device.type)
    step = CapturedStep(loss, optimizer, method.setting)
    generator = torch.Generator().manual_seed(seed)
    total, done, start = max(1, round(epochs * (len(x) // batch))), 0, time.monotonic()
    while True:
        for index in torch.randperm(len(x), generator=generator).split(batch)[: len(x) // batch]:
            progress = max(done / total, (time.monotonic() - start) / seconds)
            if progress >= 1:
                return model.eval()
            for group in optimizer.param_groups:
                group["lr"] = RATES[int(progress * len(RATES))]
            part = _augmented(x[index.to(device)], generator).contiguous(memory_format=torch.channels_last)
            step(part, y[index.to(device)])
            done += 1


def _adversarial(method: AdversarialTraining, device: str, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        return method.loss(x, y)


def _plain(method: AdversarialTraining, device: str, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        f = method.model(x)
    return F.cross_entropy(f.float(), y)


def _augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each image flipped or not; the whole batch shifted by up to four pixels, which is enough for a few epochs."""
    flip = (torch.rand(len(x), generator=generator) < 0.5).to(x.device)
    x = torch.where(flip[:, None, None, None], x.flip(3), x)
    across, down = torch.randint(0, 9, (2,), generator=generator).tolist()
    return F.pad(x, (4, 4, 4, 4))[:, :, down : down + 32, across : across + 32]


def save(model: nn.Module, path: Path) -> None:
    """Weights and statistics in half precision."""
    state = {name: v.half() if v.is_floating_point() else v for name, v in model.state_dict().items()}
    torch.save(state, path)


def read(kind: str, path: Path, width: int = 32) -> nn.Module:
    """The network that `save` stored."""
    model = make_network(kind, width)
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict({name: v.float() if v.is_floating_point() else v for name, v in state.items()})
    return model.eval()
