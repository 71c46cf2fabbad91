"""Quantities measured during training, one file each."""

from excite.probes.aligned import Alignments, JunctionAlignment, LayerAlignment
from excite.probes.alignment import Alignment, alignment
from excite.probes.consistent import Consistency, Consistent, consistency
from excite.probes.distance import Distance, distance
from excite.probes.layers import LayerRichness, Richness
from excite.probes.loss import Loss
from excite.probes.moments import Moments
from excite.probes.protocol import Every, Moment, PowersOfTwo, Probe, Schedule
from excite.probes.rank import Rank, effective_rank
from excite.probes.richness import richness
from excite.probes.smallest import Smallest, smallest_eigenvalue, smallest_eigenvalues
from excite.probes.spectrum import Between, Spectrum
from excite.probes.trajectories import Trajectory
from excite.probes.units import Units
from excite.probes.updates import Updates, trajectory

__all__ = [
    "Alignment",
    "Alignments",
    "Between",
    "Consistency",
    "Consistent",
    "Distance",
    "Every",
    "JunctionAlignment",
    "LayerAlignment",
    "LayerRichness",
    "Loss",
    "Moment",
    "Moments",
    "PowersOfTwo",
    "Probe",
    "Rank",
    "Richness",
    "Schedule",
    "Smallest",
    "Spectrum",
    "Trajectory",
    "Units",
    "Updates",
    "alignment",
    "consistency",
    "default_probes",
    "distance",
    "effective_rank",
    "richness",
    "smallest_eigenvalue",
    "smallest_eigenvalues",
    "trajectory",
]


def default_probes() -> list[Probe]:
    return [Loss(), Distance(), Rank()]
