"""Summaries of a ledger over a whole network: sizes of drift and parts, balance of layers, how fast imbalance is forgotten."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from excite.probes import LedgerReport
from excite.probes.conserved.update_terms import PARTS


def sizes(report: LedgerReport) -> dict[str, float]:
    """Norms over all channels of all laws, relative to the norm of the squared weights: of the drift and of its parts."""
    total = torch.cat([entry.scale for entry in report.entries]).norm()

    def size(amount: Callable[[Any], Tensor]) -> float:
        return float(torch.cat([amount(entry) for entry in report.entries]).norm() / total)

    result = {"drift": size(lambda e: e.drift), "rest": size(lambda e: e.residual)}
    return result | {term: size(lambda e, term=term: e.terms[term]) for term in PARTS}  # type: ignore[misc]


def fractions(report: LedgerReport) -> dict[str, float]:
    """By part ⟨part, drift⟩/‖drift‖² over all channels of all laws; with the rest they sum to one."""
    drift = torch.cat([entry.drift for entry in report.entries])

    def fraction(term: str) -> float:
        return float(torch.cat([entry.terms[term] for entry in report.entries]) @ drift / (drift @ drift))

    return {term: fraction(term) for term in PARTS}


def imbalance(report: LedgerReport) -> tuple[float, float]:
    """Over the laws that have consumers: ‖Q‖/‖Q₀‖, and the remaining initial imbalance, ⟨Q, Q₀⟩/‖Q₀‖²."""
    entries = [entry for entry in report.entries if entry.group.consumers]
    first, last = (torch.cat([getattr(e, at) for e in entries]) for at in ("start", "value"))
    return float(last.norm() / first.norm()), float(last @ first / (first @ first))


def forgotten(left: float, rate: float, steps: int) -> float:
    """How fast imbalance is forgotten, over the rate of decay alone: −log(left) / (2 · rate · steps)."""
    return -math.log(left) / (2 * rate * steps) if rate and left > 0 else math.nan


def rate_of_decay(optimizer: torch.optim.Optimizer) -> float:
    """ηλ, and with momentum ηλ/(1 − μ): how much of the weights decay takes at a step, once the buffer has filled."""
    group = optimizer.param_groups[0]
    retained = (1 - group["momentum"]) / (1 - group["dampening"]) if group.get("momentum") else 1.0
    return float(group["lr"] * group["weight_decay"] / retained)


def growth(report: LedgerReport) -> float:
    """Squared weights in front of normalizations, now over at the start; NaN if there are none."""
    entries = [entry for entry in report.entries if entry.law == "norm"]
    first = sum(float(entry.start.sum()) for entry in entries)
    return sum(float(entry.value.sum()) for entry in entries) / first if first else math.nan


def balances(report: LedgerReport, parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """By law with consumers, in the order of the network: ‖what makes its channels‖² / ‖what reads them‖²."""
    result = {}
    for entry in report.entries:
        if entry.group.consumers:
            made, read = (
                sum(float(site.rows(parameters[site.parameter].detach()).double().square().sum()) for site in sites)
                for sites in (entry.group.producers, entry.group.consumers)
            )
            result[entry.name] = made / read
    return result
