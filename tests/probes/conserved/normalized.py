"""Networks with normalizations for the tests of conserved quantities."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

NORMS: dict[str, tuple[Callable[[float, bool], nn.Module], tuple[int, ...]]] = {
    "batch_norm": (lambda eps, affine: nn.BatchNorm2d(6, eps, affine=affine), (5, 6, 3, 2)),
    "batch_norm, vectors": (lambda eps, affine: nn.BatchNorm1d(6, eps, affine=affine), (5, 6)),
    "instance_norm": (lambda eps, affine: nn.InstanceNorm2d(6, eps, affine=affine), (5, 6, 3, 2)),
    "instance_norm, one image": (lambda eps, affine: nn.InstanceNorm2d(6, eps, affine=affine), (6, 3, 2)),
    "group_norm": (lambda eps, affine: nn.GroupNorm(3, 6, eps, affine=affine), (5, 6, 3, 2)),
    "layer_norm": (lambda eps, affine: nn.LayerNorm((3, 2), eps, elementwise_affine=affine), (5, 6, 3, 2)),
    "rms_norm": (lambda eps, affine: nn.RMSNorm(2, eps, elementwise_affine=affine), (5, 6, 3, 2)),
}


def normed(name: str, affine: bool = True, eps: float = 0.05) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name in ("layer_norm", "rms_norm"):
        norm = nn.LayerNorm(6, eps, affine) if name == "layer_norm" else nn.RMSNorm(6, eps, affine)
        return nn.Sequential(nn.Linear(4, 6), norm, nn.ReLU(), nn.Linear(6, 1)).double(), torch.randn(5, 4).double()
    norm = NORMS[name][0](eps, affine)
    model = nn.Sequential(nn.Conv2d(2, 6, 2), norm, nn.ReLU(), nn.Flatten(), nn.Linear(24, 1)).double()
    return model, torch.randn(5, 2, 3, 3).double()


def simple(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 1).square().mean()  # type: ignore[no-any-return]
