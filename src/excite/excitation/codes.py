"""Equidistant targets for many classes: one code per class, every two of them at distance 1 (section 7.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from excite._core.checks import check_count
from excite.errors import InputError


def codes(m: int, outputs: int) -> Tensor:
    """The m codes as rows, (m, outputs) in float64: centred at 0, all of the same length, all distances 1.

    With m outputs, z_i = (e_i − 1/m)/√2: the nearest code is the argmax, so any ordinary classifier fits. With m − 1
    outputs, the vertices of a regular simplex: the same points in an orthonormal basis of the plane Σ z = 0 they lie in.
    For m = 2 and one output the codes are −½ and +½: the binary targets 0 and 1, shifted by −½ with their threshold.
    """
    m = check_count(m, "classes", 2)
    if outputs == m:
        return (torch.eye(m, dtype=torch.float64) - 1 / m) / 2**0.5
    if outputs == m - 1:
        return -_helmert(m).T / 2**0.5
    raise InputError(f"{m} classes need {m} or {m - 1} outputs; got {outputs}")


def _helmert(m: int) -> Tensor:
    """(m − 1, m): orthonormal rows orthogonal to (1, …, 1); row k is (1, …, 1, −k, 0, …)/√(k(k+1)) with k ones."""
    k = torch.arange(1, m, dtype=torch.float64)[:, None]
    column = torch.arange(m)[None, :]
    rows = (column < k).double() - k * (column == k)
    return rows / (k * (k + 1)).sqrt()


def nearest(output: Tensor, points: Tensor) -> Tensor:
    """The class whose code is nearest to each output, (B,): the codes have one length, so the largest product wins."""
    return (output @ points.T).argmax(1)
