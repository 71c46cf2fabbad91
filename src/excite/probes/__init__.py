"""Quantities measured during training, schedules, and the functions behind the probes."""

import math

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
from excite.probes.consequences import Consequences
from excite.probes.conserved.ledger import Ledger, conservation
from excite.probes.conserved.probe import Conservation
from excite.probes.conserved.report import LedgerEntry, LedgerReport
from excite.probes.direction import Direction, angle
from excite.probes.distance import Distance, distance
from excite.probes.flight_recorder.recorder import FlightRecorder
from excite.probes.gradient_norm import GradientNorm
from excite.probes.layer_alignment.probe import Alignment, alignment
from excite.probes.layer_alignment.result import Alignments, JunctionAlignment, LayerAlignment
from excite.probes.loss import Loss
from excite.probes.margin import Margin
from excite.probes.margin_gap import MarginGap
from excite.probes.schedules import Budget, Every, PaidSchedule, PowersOfTwo, Schedule
from excite.probes.signs import Signs, sign_changes
from excite.probes.spectrum import Between, Spectrum
from excite.probes.update_ratio import UpdateRatio
from excite.probes.vital_signs.adam_moments import AdamMoments
from excite.probes.vital_signs.attention_logits import AttentionLogits
from excite.probes.vital_signs.attention_spectrum import AttentionSpectrum
from excite.probes.vital_signs.critical_sharpness import CriticalSharpness
from excite.probes.vital_signs.dead_units import DeadUnits
from excite.probes.vital_signs.defaults import vital_signs
from excite.probes.vital_signs.log_normalizer import LogNormalizer
from excite.probes.vital_signs.residual_stream import ResidualStream
from excite.probes.vital_signs.token_rank import TokenRank

__all__ = [
    "AdamMoments",
    "Alignment",
    "Alignments",
    "AttentionLogits",
    "AttentionSpectrum",
    "Between",
    "Budget",
    "Consequences",
    "Conservation",
    "Consistency",
    "Consistent",
    "CriticalSharpness",
    "DeadUnits",
    "Direction",
    "Distance",
    "Every",
    "FlightRecorder",
    "GradientNorm",
    "JunctionAlignment",
    "LayerAlignment",
    "LayerRichness",
    "Ledger",
    "LedgerEntry",
    "LedgerReport",
    "LogNormalizer",
    "Loss",
    "Margin",
    "MarginGap",
    "Moments",
    "PaidSchedule",
    "PowersOfTwo",
    "Probe",
    "Rank",
    "ResidualStream",
    "Richness",
    "Schedule",
    "Signs",
    "Smallest",
    "Spectrum",
    "StepContext",
    "TokenRank",
    "Trajectory",
    "Units",
    "UpdateRatio",
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
    "vital_signs",
]

__getattr__ = renamed_names(__name__, {"Entry": "LedgerEntry", "Moment": "StepContext", "Reading": "LedgerReport"})


def built_in_probes() -> list[type[Probe]]:
    """All probe classes of this package, in the order of their panels: a probe that is imported here is one of them."""
    classes = {value for value in globals().values() if isinstance(value, type) and issubclass(value, Probe)} - {Probe}
    return sorted(classes, key=lambda probe: (probe.panel.order if probe.panel else math.inf, probe.name))


def default_probes(output: Pick = None) -> list[Probe]:
    """The probes that `excite.watch` uses by default: the loss at every step, the others every 50 steps.

    Args:
        output: Which part of the model's return value is the output, if it returns several; see `excite.trace`.

    Returns:
        New probes, in the order of their panels.

    Example:
        >>> from excite.probes import default_probes
        >>> [probe.name for probe in default_probes()]
        ['loss', ...]
    """
    probes = [probe.default(output) for probe in built_in_probes()]
    return [probe for probe in probes if probe is not None]
