"""One cell of the benchmark: one attack on one network in one norm, its distances, passes and seconds, stored in a file."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.attackbench.attacks import Contender
from excite.margin.problem import length


class Counted(nn.Module):
    """A model that counts the images which pass through it forward and backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.forwards, self.backwards = model, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        f: Tensor = self.model(x)
        self.forwards += len(x)
        if f.requires_grad:
            f.register_hook(self._count)
        return f

    def _count(self, gradient: Tensor) -> None:
        self.backwards += len(gradient)


@dataclass(frozen=True)
class Cell:
    """What one attack did to N images.

    distances (N,): 0 where misclassified, inf where it found no adversarial example. Passes are per image that is classified
    correctly, seconds for all of them; `device` is the machine.
    """

    distances: np.ndarray
    forwards: float
    backwards: float
    seconds: float
    device: str

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.part.npz")
        np.savez(unfinished, **vars(self))
        unfinished.replace(path)

    @classmethod
    def read(cls, path: Path) -> Cell:
        with np.load(path) as stored:
            values = {name: stored[name] for name in stored.files}
        numbers = {name: values[name].item() for name in ("forwards", "backwards", "seconds", "device")}
        return cls(distances=values["distances"], **numbers)


def cell_path(folder: Path, kind: str, norm: str, attack: str) -> Path:
    return folder / f"{kind}-{norm}-{attack}.npz"


def run_cell(model: nn.Module, x: Tensor, y: Tensor, norm: str, contender: Contender) -> Cell:
    """Attacks the images that are classified correctly. What leaves the pixels' range or is not adversarial is not counted.

    The images are decided again in one batch after the attack; an example within rounding of the boundary may fail that.
    """
    cuda = x.device.type == "cuda"
    with torch.no_grad():
        correct = model(x).argmax(1) == y
    points, labels = x[correct], y[correct]
    for weight in model.parameters():
        weight.requires_grad_(False)
    counted = Counted(model).eval()
    torch.manual_seed(0)
    _wait(cuda)
    start = time.perf_counter()
    found = contender.run(counted, points, labels, norm).detach()
    _wait(cuda)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        adversarial = (model(found).argmax(1) != labels) & ((found >= 0) & (found <= 1)).flatten(1).all(1)
    distances = torch.zeros(len(x), dtype=torch.float64)
    size = length((found - points).double(), norm).cpu()  # type: ignore[arg-type]
    distances[correct.cpu()] = torch.where(adversarial.cpu(), size, torch.inf)
    device = torch.cuda.get_device_name() if cuda else "CPU"
    n = max(1, len(points))
    return Cell(distances.numpy(), counted.forwards / n, counted.backwards / n, seconds, device)


def _wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()
