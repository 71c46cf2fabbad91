"""Quantities measured during training, one file each."""

from excite.probes.aligned import Alignments, JunctionAlignment, LayerAlignment
from excite.probes.alignment import Alignment, alignment
from excite.probes.boundary import Margin
from excite.probes.conserving import Conservation
from excite.probes.consistent import Consistency, Consistent, consistency
from excite.probes.direction import Direction, angle
from excite.probes.distance import Distance, distance
from excite.probes.layers import LayerRichness, Richness
from excite.probes.ledger import Ledger, conservation
from excite.probes.loss import Loss
from excite.probes.moments import Moments
from excite.probes.protocol import Moment, Probe
from excite.probes.rank import Rank, effective_rank
from excite.probes.reading import Entry, Reading
from excite.probes.richness import richness
from excite.probes.schedules import Budget, Every, PowersOfTwo, Schedule
from excite.probes.signs import Signs, sign_changes
from excite.probes.smallest import Smallest, smallest_eigenvalue, smallest_eigenvalues
from excite.probes.spectrum import Between, Spectrum
from excite.probes.trajectories import Trajectory
from excite.probes.units import Units
from excite.probes.updates import Updates, trajectory
from excite.wiring.calling import Pick

__all__ = [
    "Alignment",
    "Alignments",
    "Between",
    "Budget",
    "Conservation",
    "Consistency",
    "Consistent",
    "Direction",
    "Distance",
    "Entry",
    "Every",
    "JunctionAlignment",
    "LayerAlignment",
    "LayerRichness",
    "Ledger",
    "Loss",
    "Margin",
    "Moment",
    "Moments",
    "PowersOfTwo",
    "Probe",
    "Rank",
    "Reading",
    "Richness",
    "Schedule",
    "Signs",
    "Smallest",
    "Spectrum",
    "Trajectory",
    "Units",
    "Updates",
    "alignment",
    "angle",
    "conservation",
    "consistency",
    "default_probes",
    "distance",
    "effective_rank",
    "richness",
    "sign_changes",
    "smallest_eigenvalue",
    "smallest_eigenvalues",
    "trajectory",
]


def default_probes(output: Pick = None) -> list[Probe]:
    """What `excite.watch` measures, every 50 steps, and the loss at every step.

    `output` says which part is the output of a model that returns several.
    """
    often = Every(50)
    return [
        Loss(),
        Trajectory(often, output=output, passes="measured", sandwich=1, most=16),
        Distance(often),
        Rank(often, most_rows=128),
        Conservation(often, parts=False, output=output),
        Alignment(often, exact=32, output=output),
        Signs(often),
    ]
