"""Normalizations that are made of elementary operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excite.wiring.export import exported
from excite.wiring.propagation.written_norms import find_written_norms


class Norm(nn.Module):
    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.weight = norm, nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.norm(x)


def found(norm: Callable[[Tensor], Tensor]) -> list[tuple[str, float, str]]:
    norms = find_written_norms(exported(Norm(norm), torch.randn(2, 3, 4)).graph.nodes).norms.values()
    return [(one.op, one.eps, one.form) for one in norms]


def mean_square(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


@pytest.mark.parametrize(
    ("norm", "expected"),
    [
        (lambda x: x * torch.rsqrt(mean_square(x) + 1e-6), ("rms_norm", 1e-6, "mean")),
        (lambda x: torch.rsqrt(mean_square(x) + 1e-6) * x, ("rms_norm", 1e-6, "mean")),
        (lambda x: x / (mean_square(x) + 1e-6).sqrt(), ("rms_norm", 1e-6, "mean")),
        (lambda x: x * (mean_square(x) + 1e-6) ** -0.5, ("rms_norm", 1e-6, "mean")),
        (lambda x: (y := x.float()) * torch.rsqrt(y.square().mean(-1, True) + 1e-6), ("rms_norm", 1e-6, "mean")),
        (lambda x: x * torch.rsqrt((x * x).sum(-1, True) + 1e-6), ("rms_norm", 1e-6, "other")),
        (lambda x: x / (mean_square(x).sqrt() + 1e-6), ("rms_norm", 0.0, "other")),
        (lambda x: F.normalize(x, dim=-1), ("rms_norm", 0.0, "clamped")),
        (lambda x: (x - x.mean(-1, True)) / torch.sqrt(x.var(-1, keepdim=True, correction=0) + 1e-5), ("layer_norm", 1e-5, "mean")),
        (lambda x: (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + 1e-5), ("layer_norm", 0.0, "other")),
        (lambda x: (c := x - x.mean(-1, True)) * torch.rsqrt(mean_square(c) + 1e-5), ("layer_norm", 1e-5, "mean")),
    ],
)  # fmt: skip
def test_forms(norm, expected):
    assert found(norm) == [expected]


@pytest.mark.parametrize(
    "norm",
    [
        lambda x: x * torch.rsqrt(mean_square(x) + 1.0),  # no small constant
        lambda x: x * torch.rsqrt(mean_square(x.flip(-1)) + 1e-6),  # of another tensor
        lambda x: (r := torch.rsqrt(mean_square(x) + 1e-6)) * x + r,  # the statistic is read elsewhere
        lambda x: x * torch.rsqrt(x.pow(4).mean(-1, True) + 1e-6),
        lambda x: x * x.pow(2).mean(-1, True),
        lambda x: x / (x.var(-1, keepdim=True) + 1e-6).sqrt(),  # divided by the deviation without the mean
    ],
)
def test_what_is_no_normalization(norm):
    assert found(norm) == []
