"""Bounds from theory: one function per theorem, each returns a `Bound` with its assumptions checked."""

from excite.bounds.bound import Assumption, Bound
from excite.bounds.excitation.active import MostActive, most_active
from excite.bounds.excitation.cross_entropy import linear_margin, linear_margin_any_time
from excite.bounds.excitation.linear_rank import alignment, cross_entropy_rank, decay_rank
from excite.bounds.excitation.matrix_regularization import matrix_equivalence
from excite.bounds.excitation.regularization import Equivalence, penalty_of_radius, radius_of_penalty
from excite.bounds.excitation.relaxed_margin import relaxed_linear_margin
from excite.bounds.excitation.two_layer import two_layer_lipschitz, two_layer_margin
from excite.bounds.excitation.two_layer_cross_entropy import directional_lipschitz
from excite.bounds.invariances.law_count import LawCount, count_laws
from excite.bounds.invariances.reduced_alignment import reduced_alignment
from excite.bounds.richness.deep import deep_lipschitz, deep_norms
from excite.bounds.stability import Descent, Sharpness, descent_stability, sharpness
from excite.bounds.trajectory.bias_motion import bias_distance, bias_variance, trajectory_length
from excite.bounds.trajectory.covering import Covering, covering_number
from excite.bounds.trajectory.dropout import DropoutRun, DropoutStatement, dropout_generalization
from excite.bounds.trajectory.first_layer import first_layer_lipschitz
from excite.bounds.trajectory.regions import EmptyRegions, empty_region
from excite.bounds.trajectory.steady import Steadiness, steadiness, steady_lipschitz

__all__ = [
    "Assumption",
    "Bound",
    "Covering",
    "Descent",
    "DropoutRun",
    "DropoutStatement",
    "EmptyRegions",
    "Equivalence",
    "LawCount",
    "MostActive",
    "Sharpness",
    "Steadiness",
    "alignment",
    "bias_distance",
    "bias_variance",
    "count_laws",
    "covering_number",
    "cross_entropy_rank",
    "decay_rank",
    "deep_lipschitz",
    "deep_norms",
    "descent_stability",
    "directional_lipschitz",
    "dropout_generalization",
    "empty_region",
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
