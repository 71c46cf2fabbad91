"""One value out of the values of all processes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from excite._core.distributed import rank_and_size
from excite.probes.base import Probe, Reduction

Row = tuple[int, Probe, dict[str, float] | None]  # step, probe, values by full name; None where the probe raised


def reduction_of(probe: Probe, name: str) -> Reduction:
    """How a value `probe/quantity/layer` is reduced."""
    return probe.reductions.get(name.split("/")[1], probe.reduction)


def reduce_rows(rows: Sequence[Row], device: torch.device) -> list[dict[str, float] | None]:
    """The same on every process; None for a row whose probe raised on any of them.

    Every process comes with the same steps and probes. Where it also has the same names, sums are made by one collective
    for each kind of reduction; otherwise all rows travel, and processes without a value do not count.
    """
    if rank_and_size()[1] == 1 or not rows:
        return [values for _, _, values in rows]
    names = [None if values is None else sorted(values) for _, _, values in rows]
    # A number below 2⁴⁸ is exact in float64; its largest and its smallest value over processes agree if all do.
    digest = int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=6).digest(), "big")
    digests = torch.tensor([digest, -digest], dtype=torch.float64, device=device)
    dist.all_reduce(digests, dist.ReduceOp.MAX)
    if digests[0] != -digests[1]:
        return _gathered(rows)
    places: dict[Reduction, list[tuple[int, str]]] = {}
    for i, (_, probe, values) in enumerate(rows):
        for name in sorted(values or {}):
            places.setdefault(reduction_of(probe, name), []).append((i, name))
    result: list[dict[str, float] | None] = [None if values is None else {} for _, _, values in rows]
    for reduction in sorted(places):
        flat = torch.tensor([rows[i][2][name] for i, name in places[reduction]], dtype=torch.float64, device=device)  # type: ignore[index]
        for (i, name), value in zip(places[reduction], _reduced(flat, reduction).tolist()):
            result[i][name] = value  # type: ignore[index]
    return result


def _reduced(values: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    if reduction == "first":
        dist.broadcast(values, 0)
        return values
    if reduction in ("max", "min"):
        # What a library makes of NaN depends on which process has it: here it is a process without a value.
        sign, present = (1 if reduction == "max" else -1), ~values.isnan()
        both = torch.stack([torch.where(present, sign * values, -math.inf), present.to(values.dtype)])
        dist.all_reduce(both, dist.ReduceOp.MAX)
        return torch.where(both[1] > 0, sign * both[0], math.nan)
    dist.all_reduce(values, dist.ReduceOp.SUM)
    return values / dist.get_world_size() if reduction == "mean" else values


def _gathered(rows: Sequence[Row]) -> list[dict[str, float] | None]:
    by_rank: list[list[dict[str, float] | None]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, [values for _, _, values in rows])
    result: list[dict[str, float] | None] = []
    for (_, probe, _), gathered in zip(rows, zip(*by_rank)):
        present = [values for values in gathered if values is not None]
        if len(present) < len(gathered):
            result.append(None)
            continue
        names = sorted(set().union(*present))
        result.append(
            {name: _reduce_value(probe, name, [values[name] for values in present if name in values]) for name in names}
        )
    return result


def _reduce_value(probe: Probe, name: str, values: Sequence[float]) -> float:
    reduction = reduction_of(probe, name)
    if reduction in ("max", "min"):
        values = [value for value in values if not math.isnan(value)] or [math.nan]
    total: Mapping[Reduction, float] = {
        "mean": sum(values) / len(values), "sum": sum(values), "max": max(values), "min": min(values), "first": values[0],
    }  # fmt: skip
    return total[reduction]
