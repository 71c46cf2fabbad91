"""How steep a model is: exact local Lipschitz constants, the largest along segments and on slices, lower bounds by search,
and guaranteed global ones."""

from excite.lipschitz import constants, movements  # noqa: F401 - they fill the table of rules
from excite.lipschitz.bounding import LipschitzBound, bound
from excite.lipschitz.jacobians import local
from excite.lipschitz.searching import Largest, largest
from excite.lipschitz.segments import Segments, along
from excite.lipschitz.slices import RegionMap, region_map

__all__ = [
    "Largest",
    "LipschitzBound",
    "RegionMap",
    "Segments",
    "along",
    "bound",
    "largest",
    "local",
    "region_map",
]
