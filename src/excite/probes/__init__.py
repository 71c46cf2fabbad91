"""Quantities measured during training, one file each."""

from excite.probes.conserving import Conservation
from excite.probes.direction import Direction, angle
from excite.probes.distance import Distance, distance
from excite.probes.layers import LayerRichness, Richness
from excite.probes.ledger import Ledger, conservation
from excite.probes.loss import Loss
from excite.probes.moments import Moments
from excite.probes.protocol import Every, Moment, PowersOfTwo, Probe, Schedule
from excite.probes.rank import Rank, effective_rank
from excite.probes.reading import Entry, Reading
from excite.probes.richness import richness
from excite.probes.signs import Signs, sign_changes
from excite.probes.smallest import Smallest, smallest_eigenvalue, smallest_eigenvalues
from excite.probes.spectrum import Between, Spectrum
from excite.probes.units import Units

__all__ = [
    "Between",
    "Conservation",
    "Direction",
    "Distance",
    "Entry",
    "Every",
    "LayerRichness",
    "Ledger",
    "Loss",
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
    "Units",
    "angle",
    "conservation",
    "default_probes",
    "distance",
    "effective_rank",
    "richness",
    "sign_changes",
    "smallest_eigenvalue",
    "smallest_eigenvalues",
]


def default_probes() -> list[Probe]:
    return [Loss(), Distance(), Rank()]
