"""The operator table: one row per ATen operator, one file per family of operators.

The names are those of exported graphs (`conv2d`, `layer_norm`) and those that PyTorch dispatches to in evaluation mode
without gradients (`convolution`, `native_layer_norm`). An operator without a row, or without the column that an analysis
needs, is refused by name. `docs/development/new-operator.md` shows how to add one.
"""

from excite.wiring.operators import (  # each of them adds its rows to the table
    activations,
    arithmetic,
    attention,
    comparison,
    convolution,
    linear,
    movement,
    normalization,
    pooling,
    reduction,
)
from excite.wiring.operators.row import OPERATORS, ActivationKinks, Linearity, OperatorRow, Pieces

__all__ = [
    "OPERATORS",
    "ActivationKinks",
    "Linearity",
    "OperatorRow",
    "Pieces",
    "activations",
    "arithmetic",
    "attention",
    "comparison",
    "convolution",
    "linear",
    "movement",
    "normalization",
    "pooling",
    "reduction",
]
