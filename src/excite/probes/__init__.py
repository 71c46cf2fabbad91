"""Quantities measured during training, one file each."""

from excite.probes.distance import Distance, distance
from excite.probes.loss import Loss
from excite.probes.protocol import Every, Moment, PowersOfTwo, Probe, Schedule
from excite.probes.rank import Rank, effective_rank

__all__ = [
    "Distance",
    "Every",
    "Loss",
    "Moment",
    "PowersOfTwo",
    "Probe",
    "Rank",
    "Schedule",
    "default_probes",
    "distance",
    "effective_rank",
]


def default_probes() -> list[Probe]:
    return [Loss(), Distance(), Rank()]
