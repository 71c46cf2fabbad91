"""Trained networks for the tests of margins: digits, small enough to train in a second or two."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from excite.excitation import PersistentExcitation

BOUNDS = (-1.0, 1.0)
TRAIN = 1200


@cache
def digits(two: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images (N, 1, 8, 8) with pixels in [-1, 1] and labels, then test; 8 against 1 if `two`."""
    x, y = load_digits(return_X_y=True)
    images, labels = torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1, torch.tensor(y)
    if two:
        chosen = (labels == 8) | (labels == 1)
        images, labels = images[chosen], (labels[chosen] == 8).long()
        return images[:250], labels[:250], images[250:], labels[250:]
    return images[:TRAIN], labels[:TRAIN], images[TRAIN : TRAIN + 150], labels[TRAIN : TRAIN + 150]


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, outputs)
    )


def convolutional(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, outputs),
    )  # fmt: skip


@cache
def trained(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A network and test points: "mlp", "convolutional", "excited", "classes", "robust classes", "linear"."""
    many = kind in ("classes", "robust classes", "linear")
    x, y, x_test, y_test = digits(not many)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        outputs = 10 if many else 1
        model = mlp(outputs) if kind == "mlp" else convolutional(outputs)
        if kind == "linear":
            model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        optimizer = torch.optim.Adam(model.parameters(), 2e-3)
        excitation = PersistentExcitation(model, radius=0.05) if kind == "excited" else None
        for _ in range(20 if many else 40):
            for index in torch.randperm(len(x)).split(64):
                xb, yb = x[index], y[index]
                if kind == "robust classes":
                    xb = _attacked(model, xb, yb)
                optimizer.zero_grad()
                if excitation is not None:
                    excitation.loss(xb, yb).backward()
                elif many:
                    F.cross_entropy(model(xb), yb).backward()
                else:
                    F.mse_loss(model(xb)[:, 0], yb.float()).backward()
                optimizer.step()
    return model.eval(), x_test, y_test


def _attacked(model: nn.Module, x: Tensor, y: Tensor, radius: float = 0.2) -> Tensor:
    d = torch.zeros_like(x)
    for _ in range(4):
        d.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(x + d), y), d)
        d = (d.detach() + radius / 3 * gradient.sign()).clamp(-radius, radius)
    return x + d
