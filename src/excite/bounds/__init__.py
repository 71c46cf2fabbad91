"""What theory promises: one function a theorem, each returns a `Bound` with its assumptions checked."""

from excite.bounds.bound import Assumption, Bound
from excite.bounds.cross_entropy import linear_margin, linear_margin_any_time
from excite.bounds.linear_rank import alignment, cross_entropy_rank, decay_rank
from excite.bounds.matrix_regularization import matrix_equivalence
from excite.bounds.regularization import Equivalence, penalty_of_radius, radius_of_penalty
from excite.bounds.relaxed_margin import relaxed_linear_margin
from excite.bounds.two_layer_cross_entropy import two_layer_lipschitz

__all__ = [
    "Assumption",
    "Bound",
    "Equivalence",
    "alignment",
    "cross_entropy_rank",
    "decay_rank",
    "linear_margin",
    "linear_margin_any_time",
    "matrix_equivalence",
    "penalty_of_radius",
    "radius_of_penalty",
    "relaxed_linear_margin",
    "two_layer_lipschitz",
]
