"""Quantities measured during training, one file each."""

from excite._core.calls import Pick
from excite._core.compatibility import renamed_names
from excite.probes.activation_rank.moments import Moments
from excite.probes.activation_rank.rank import Rank, effective_rank
from excite.probes.activation_rank.result import LayerRichness, Richness
from excite.probes.activation_rank.richness import richness
from excite.probes.activation_rank.smallest import Smallest, smallest_eigenvalue, smallest_eigenvalues
from excite.probes.activation_rank.units import Units
from excite.probes.base import Probe, StepContext
from excite.probes.bias_trajectory.consistency import Consistency, Consistent, consistency
from excite.probes.bias_trajectory.probe import Trajectory
from excite.probes.bias_trajectory.updates import Updates, trajectory
from excite.probes.conserved.ledger import Ledger, conservation
from excite.probes.conserved.probe import Conservation
from excite.probes.conserved.report import LedgerEntry, LedgerReport
from excite.probes.direction import Direction, angle
from excite.probes.distance import Distance, distance
from excite.probes.layer_alignment.probe import Alignment, alignment
from excite.probes.layer_alignment.result import Alignments, JunctionAlignment, LayerAlignment
from excite.probes.loss import Loss
from excite.probes.margin import Margin
from excite.probes.schedules import Budget, Every, PowersOfTwo, Schedule
from excite.probes.signs import Signs, sign_changes
from excite.probes.spectrum import Between, Spectrum

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
    "Every",
    "JunctionAlignment",
    "LayerAlignment",
    "LayerRichness",
    "Ledger",
    "LedgerEntry",
    "LedgerReport",
    "Loss",
    "Margin",
    "Moments",
    "PowersOfTwo",
    "Probe",
    "Rank",
    "Richness",
    "Schedule",
    "Signs",
    "Smallest",
    "Spectrum",
    "StepContext",
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

__getattr__ = renamed_names(__name__, {"Entry": "LedgerEntry", "Moment": "StepContext", "Reading": "LedgerReport"})


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
