"""What `excite.watch` measures, and when: the choice of probes and schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from excite._core.calls import Batch, Pick
from excite.errors import InputError
from excite.probes import AdamMoments, FlightRecorder, Probe, default_probes, vital_signs
from excite.probes.schedules import Schedule, as_schedule
from excite.probes.vital_signs.adam_moments import is_adam
from excite.probes.vital_signs.blocks import has_attention

Every = int | Schedule | Mapping[str, int | Schedule]


def chosen_probes(
    probes: Sequence[Probe] | None,
    every: Every | None,
    example: Batch | None,
    optimizer: torch.optim.Optimizer | None,
    output: Pick,
    further: Sequence[Probe],
    model: nn.Module,
) -> list[Probe]:
    """The probes to attach. Of the defaults those are left out that need an example or an optimizer that is not there."""
    given = {"example": example, "optimizer": optimizer}
    if probes is None:
        everything = default_probes(output) + _signs(model, optimizer, output)
        chosen = [p for p in everything if all(given[need] is not None for need in p.requires)]
    else:
        chosen = list(probes)
    for probe in chosen:
        if not isinstance(probe, Probe):
            raise InputError(f"watch: expected probes such as excite.probes.Rank(); got {probe!r}")
    chosen += further
    names = [probe.name for probe in chosen]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"watch: two probes are called {name!r}: give each its own name")
    if every is not None:
        _schedule(chosen, every)
    return chosen


def _signs(model: nn.Module, optimizer: torch.optim.Optimizer | None, output: Pick) -> list[Probe]:
    """Vital signs of models with attention; without Adam's moments for other optimizers."""
    if not has_attention(model):
        return []
    adam = optimizer is not None and is_adam(optimizer)
    signs = [probe for probe in vital_signs(output=output) if adam or not isinstance(probe, AdamMoments)]
    return [*signs, FlightRecorder()]


def _schedule(probes: Sequence[Probe], every: Every) -> None:
    """A dict by name for those it names; anything else for all but the loss and the recorder, which see every step, and the margins."""
    if not isinstance(every, Mapping):
        schedule = as_schedule(every)
        for probe in probes:
            if probe.name not in ("loss", "margin", "margin_gap", "recorder"):
                probe.schedule = schedule
        return
    by_name = {probe.name: probe for probe in probes}
    for name, one in every.items():
        if name not in by_name:
            raise InputError(f"every: there is no probe {name!r}; there are {', '.join(by_name)}")
        by_name[name].schedule = as_schedule(one, f"every[{name!r}]")
