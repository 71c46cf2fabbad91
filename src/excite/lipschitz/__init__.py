"""How steep a model is: exact local Lipschitz constants, and guaranteed global ones."""

from excite.lipschitz import constants, movements  # they fill the table of rules
from excite.lipschitz.bounding import LipschitzBound, bound
from excite.lipschitz.jacobians import local

__all__ = ["LipschitzBound", "bound", "constants", "local", "movements"]
