"""Default probes and schedules of `excite.watch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from excite._core.calls import Batch, Pick
from excite._core.wrappers import eagerly, is_compiled
from excite.errors import InputError
from excite.probes import (
    AdamMoments,
    CriticalSharpness,
    Distance,
    FlightRecorder,
    Probe,
    Signs,
    Trajectory,
    default_probes,
    vital_signs,
)
from excite.probes.schedules import Schedule, as_schedule
from excite.probes.vital_signs.adam_moments import is_adam
from excite.probes.vital_signs.blocks import has_attention
from excite.probes.vital_signs.critical_sharpness import default_loss

LARGE = 500_000_000  # trained weights, above which no copies of all of them are kept
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
    """The probes to attach. Defaults that need an example or an optimizer are left out without one."""
    available = {"example": example, "optimizer": optimizer}
    if probes is None:
        everything = _affordable(default_probes(output), model) + _signs(model, optimizer, output, example)
        chosen = [p for p in everything if all(available[need] is not None for need in p.requires)]
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


def _affordable(probes: Sequence[Probe], model: nn.Module) -> list[Probe]:
    """Without probes that cost too much.

    Of large models those that hold copies of all weights: nine bytes for each, where training holds sixteen. Of compiled
    transformers the trajectory, which breaks their graphs.
    """
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    left_out: list[type[Probe]] = [Distance, Signs] if weights > LARGE else []
    if has_attention(model) and is_compiled(model):
        left_out.append(Trajectory)  # its hooks would break the graph at every layer
    return [probe for probe in probes if not isinstance(probe, tuple(left_out))]


def _signs(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, output: Pick, example: Batch | None
) -> list[Probe]:
    """Vital signs of models with attention; without Adam's moments for other optimizers, and without sharpness where no loss is known."""
    if not has_attention(model):
        return []
    left_out: list[type[Probe]] = []
    if optimizer is None or not is_adam(optimizer):
        left_out.append(AdamMoments)
    if example is not None and not _has_loss(model, example):
        left_out.append(CriticalSharpness)
    signs = [probe for probe in vital_signs(output=output) if not isinstance(probe, tuple(left_out))]
    return [*signs, FlightRecorder()]


def _has_loss(model: nn.Module, example: Batch) -> bool:
    try:
        with eagerly(model):
            default_loss(model, example)
    except InputError:  # it says how to give one
        return False
    except Exception:
        return True  # that of the probe says what is wrong, when it is attached
    return True


def _schedule(probes: Sequence[Probe], every: Every) -> None:
    """A dict by name for those it names; anything else for all but the loss and the recorder, which see every step, and the margins."""
    if not isinstance(every, Mapping):
        schedule = as_schedule(every)
        for probe in probes:
            if probe.name not in ("loss", "margin", "margin_gap", "recorder"):
                probe.schedule = schedule
        return
    by_name = {probe.name: probe for probe in probes}
    for name, interval in every.items():
        if name not in by_name:
            raise InputError(f"every: there is no probe {name!r}; there are {', '.join(by_name)}")
        by_name[name].schedule = as_schedule(interval, f"every[{name!r}]")
