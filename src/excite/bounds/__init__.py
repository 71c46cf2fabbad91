"""What theory promises: one function a theorem, each returns a `Bound` with its assumptions checked."""

from excite.bounds.active import MostActive, most_active
from excite.bounds.bound import Assumption, Bound
from excite.bounds.deep import deep_lipschitz, deep_norms
from excite.bounds.stability import Descent, Sharpness, descent_stability, sharpness
from excite.bounds.two_layer import two_layer_lipschitz, two_layer_margin

__all__ = [
    "Assumption",
    "Bound",
    "Descent",
    "MostActive",
    "Sharpness",
    "deep_lipschitz",
    "deep_norms",
    "descent_stability",
    "most_active",
    "sharpness",
    "two_layer_lipschitz",
    "two_layer_margin",
]
