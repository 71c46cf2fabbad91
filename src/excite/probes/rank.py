"""How many directions the input of a layer uses."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from excite.errors import InputError
from excite.probes.protocol import Every, Moment, Probe, Schedule, Signal, Values


def effective_rank(rows: Tensor) -> float:
    """exp of the entropy of λ/Σλ, with λ the eigenvalues of the covariance of `rows` (N, D), after Roy and Vetterli.

    Between 1 (all variance in one direction) and min(N − 1, D) (the same in all of them); 0 if the rows are all equal.
    """
    if rows.dim() != 2:
        raise InputError(f"effective_rank: expected rows (N, D); got shape {tuple(rows.shape)}")
    rows = rows.detach().double()
    size = rows.abs().amax() if rows.numel() else rows.new_zeros(())
    if not bool(torch.isfinite(size)):
        raise InputError("effective_rank: expected finite values")
    rows = rows - rows.mean(0, keepdim=True)
    # The smaller of the two Gram matrices has the same eigenvalues other than zero.
    gram = rows.T @ rows if rows.shape[1] <= rows.shape[0] else rows @ rows.T
    eigenvalues = torch.linalg.eigvalsh(gram).clamp(min=0)
    total = eigenvalues.sum()
    # What is left of equal rows after subtracting their mean is rounding, not variance.
    if float(total) <= rows.numel() * (torch.finfo(rows.dtype).eps * float(size)) ** 2:
        return 0.0
    shares = eigenvalues / total
    return math.exp(float(torch.special.entr(shares).sum()))


def seen_by(signal: Signal, most_rows: int) -> Tensor:
    """The vectors that a layer's weight multiplies, as rows: patches for convolutions, at most `most_rows` of them.

    Rows left out are left out evenly, without drawing random numbers.
    """
    x, call = signal.input, signal.call
    weight = call.weight
    if call.kind == "linear":
        at_front = getattr(call.function, "__name__", "") not in ("linear",) and call.weight_at == 0
        rows = (x.transpose(-2, -1) if at_front else x).reshape(-1, x.shape[-2 if at_front else -1])
        return rows[:: _stride(len(rows), most_rows)]
    if "transpose" in call.function.__name__:
        return x.movedim(1, -1).reshape(-1, x.shape[1])[:: _stride(x.numel() // x.shape[1], most_rows)]
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given: dict[str, Any] = {**dict(zip(names, call.args)), **call.kwargs}
    spatial = weight.dim() - 2
    stride, dilation = (_tuple(given.get(key, 1), spatial) for key in ("stride", "dilation"))
    padding = _padding(given.get("padding", 0), weight.shape[2:], dilation)
    x = F.pad(x, [side for pair in reversed(padding) for side in pair])
    for axis, (size, step, gap) in enumerate(zip(weight.shape[2:], stride, dilation)):
        x = x.unfold(axis + 2, gap * (size - 1) + 1, step)[..., ::gap]
    # (B, C, positions..., kernel...) -> (B·positions, C·kernel)
    rows = x.movedim(1, 1 + spatial).flatten(0, spatial)
    return rows[:: _stride(len(rows), most_rows)].flatten(1)


def _stride(count: int, most: int) -> int:
    return max(1, math.ceil(count / most))


def _tuple(value: Any, n: int) -> tuple[int, ...]:
    return (value,) * n if isinstance(value, int) else tuple(value) * (n if len(value) == 1 else 1)


def _padding(value: Any, kernel: torch.Size, dilation: tuple[int, ...]) -> list[tuple[int, int]]:
    if value == "same":
        totals = [gap * (size - 1) for size, gap in zip(kernel, dilation)]
        return [(total // 2, total - total // 2) for total in totals]
    sides = (0,) * len(kernel) if value == "valid" else _tuple(value, len(kernel))
    return [(side, side) for side in sides]


class Rank(Probe):
    """`rank/effective/layer`: effective rank of each layer's input on the example; `rank/share/layer`: over its width.

    Channels of a grouped convolution count together. At most `most_rows` rows a layer.
    """

    name = "rank"
    reduction = "mean"

    def __init__(self, schedule: Schedule | None = None, most_rows: int = 1024):
        super().__init__(schedule or Every(50))
        self.most_rows = most_rows

    def measure(self, now: Moment) -> Values:
        values: dict[str, float] = {}
        for signal in now.signals:
            if signal.input.is_floating_point():
                rows = seen_by(signal, self.most_rows)
                values[f"effective/{signal.layer}"] = rank = effective_rank(rows)
                values[f"share/{signal.layer}"] = rank / rows.shape[1]
        return values
