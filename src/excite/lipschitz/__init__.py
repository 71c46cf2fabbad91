"""Lipschitz constants of a model: exact local ones, the largest along segments and on slices, lower and upper bounds."""

from excite.lipschitz.embeddings import FromEmbeddings, from_embeddings
from excite.lipschitz.local_constants import local
from excite.lipschitz.lower import Largest, largest
from excite.lipschitz.regions import RegionMap, region_map
from excite.lipschitz.segments import Segments, along
from excite.lipschitz.upper import LipschitzBound, bound

__all__ = [
    "FromEmbeddings",
    "Largest",
    "LipschitzBound",
    "RegionMap",
    "Segments",
    "along",
    "bound",
    "from_embeddings",
    "largest",
    "local",
    "region_map",
]
