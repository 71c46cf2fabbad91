"""The table of ATen operators: one row per operator. Its first column says how an operator depends on its arguments."""

from excite.wiring.operators.row import Linearity, Operator
from excite.wiring.operators.table import OPERATORS

__all__ = ["OPERATORS", "Linearity", "Operator"]
