"""What theory promises: one function a theorem, each returns a `Bound` with its assumptions checked."""

from excite.bounds.active import MostActive, most_active
from excite.bounds.bias_motion import bias_distance, bias_variance, trajectory_length
from excite.bounds.bound import Assumption, Bound
from excite.bounds.cross_entropy import linear_margin, linear_margin_any_time
from excite.bounds.deep import deep_lipschitz, deep_norms
from excite.bounds.first_layer import first_layer_lipschitz
from excite.bounds.linear_rank import alignment, cross_entropy_rank, decay_rank
from excite.bounds.matrix_regularization import matrix_equivalence
from excite.bounds.reduced_alignment import reduced_alignment
from excite.bounds.regularization import Equivalence, penalty_of_radius, radius_of_penalty
from excite.bounds.relaxed_margin import relaxed_linear_margin
from excite.bounds.stability import Descent, Sharpness, descent_stability, sharpness
from excite.bounds.steady import Steadiness, steadiness, steady_lipschitz
from excite.bounds.two_layer import two_layer_lipschitz, two_layer_margin
from excite.bounds.two_layer_cross_entropy import directional_lipschitz

__all__ = [
    "Assumption",
    "Bound",
    "Descent",
    "Equivalence",
    "MostActive",
    "Sharpness",
    "Steadiness",
    "alignment",
    "bias_distance",
    "bias_variance",
    "cross_entropy_rank",
    "decay_rank",
    "deep_lipschitz",
    "deep_norms",
    "descent_stability",
    "directional_lipschitz",
    "first_layer_lipschitz",
    "linear_margin",
    "linear_margin_any_time",
    "matrix_equivalence",
    "most_active",
    "penalty_of_radius",
    "radius_of_penalty",
    "reduced_alignment",
    "relaxed_linear_margin",
    "sharpness",
    "steadiness",
    "steady_lipschitz",
    "trajectory_length",
    "two_layer_lipschitz",
    "two_layer_margin",
]
