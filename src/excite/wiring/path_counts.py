"""How many paths lead through a model, from a number of its input to a number of its output; in networks of any size.

Dynamic programming over the graph: with every weight 1, every activation the identity and every input 1, what arrives at a
vertex is the number of paths to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.calls import Batch, Pick, check_finite
from excite._core.checks import check_flag, check_model, model_errors
from excite._core.wrappers import refuse_lazy, unwrap
from excite.errors import ModelError
from excite.wiring.export import ExportFailed, exported
from excite.wiring.operators.activations import unchanged
from excite.wiring.propagation.counts import PathContext, ScaledCounts
from excite.wiring.propagation.interpreter import Interpreter, lookup, refused


@dataclass(frozen=True)
class PathCount:
    """The number of paths of one sample.

    Attributes:
        log10: Logarithm of the number of paths to all outputs together.
        log10_by_output: Logarithm of the number of paths to each output.

    Example:
        >>> model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> round(10 ** excite.wiring.path_count(model, torch.zeros(2, 5)).log10)
        40
    """

    log10: float
    log10_by_output: tuple[float, ...]

    @property
    def total(self) -> float:
        """Number of paths: exact below 2⁵², to about 14 digits above, infinite beyond 10³⁰⁸."""
        total = 10.0**self.log10 if self.log10 < 308 else math.inf
        return float(round(total)) if total < 2**52 else total

    def __str__(self) -> str:
        return f"{self.total:.0f} paths" if self.total < 1e9 else f"10^{self.log10:.2f} paths"


class PathInterpreter(Interpreter):
    """Propagates numbers of paths: with every weight 1, every activation the identity and every input 1."""

    column = "paths"
    refusal = "paths cannot be counted through"
    followed = (ScaledCounts,)
    context: PathContext

    def parameter(self, node: torch.fx.Node, path: str) -> Tensor:
        """Returns a tensor of ones in the shape of the parameter: every entry is one edge."""
        return torch.ones(node.meta["val"].shape, dtype=torch.float64)

    def input(self, node: torch.fx.Node) -> Any:
        """Returns one path per element of the model's input."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point():
            raise ModelError("paths cannot be counted from whole numbers (token ids): they enter by a table")
        return ScaledCounts(torch.ones(value.shape, dtype=torch.float64))

    def apply(self, rule: Callable[..., Any], node: torch.fx.Node, arguments: SimpleNamespace) -> Any:
        """Applies an operator's rule, or raises a ModelError if it does not cover these arguments."""
        counts = rule(self.context, node, arguments)
        if counts is None:
            raise refused(self.refusal, node, f"{arguments.op} with these arguments")
        return counts

    def overwritten(self, node: torch.fx.Node, values: list[Any]) -> None:
        """Refuses writing in place where that changes the number of paths."""
        row = lookup(node.target)
        if row is None or row.paths is not unchanged:
            super().overwritten(node, values)


@model_errors
def path_count(model: nn.Module, example: Batch, *, biases: bool = False, output: Pick = None) -> PathCount:
    """Counts the paths from the inputs to the outputs of the computation graph of a model, for one sample.

    Vertices are the numbers that layers produce, so a convolution has a vertex for every position; weights that are shared
    count once for every position. A pooling window joins all its elements. Normalizations count as one edge per number,
    as if their statistics were constants.

    Args:
        model: A feedforward network of affine layers, (leaky) ReLU, pooling, sums, concatenations and normalizations.
        example: A batch as the model takes it; only its shapes matter.
        biases: Whether every bias is one more input, as in the paper.
        output: Selects the output of a model that returns a tuple or a dict.

    Returns:
        The number of paths, as a logarithm, in total and per output.

    Raises:
        ModelError: If the model has an operator for which paths are not defined; it is named.

    Example:
        >>> model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> print(excite.wiring.path_count(model, torch.zeros(2, 5)))
        40 paths
    """
    model = unwrap(check_model(model))
    refuse_lazy(model)
    check_flag(biases, "biases")
    check_finite(example, "values in the example")
    try:
        graph = exported(model, example, output, only_output=True)
    except ExportFailed as failure:
        raise ModelError(f"paths cannot be counted: torch.export failed: {failure}") from failure
    return _result(PathInterpreter(PathContext(biases)).run(graph))


def _result(counts: Any) -> PathCount:
    while isinstance(counts, tuple | list):
        counts = counts[0]
    if not isinstance(counts, ScaledCounts):
        return PathCount(-math.inf, ())
    if not counts.values.dim():
        raise ModelError(
            "paths cannot be counted to one number for the whole batch: pick an output with one row per sample by output="
        )
    sample = counts.values[0].reshape(-1)
    offset = counts.power * math.log10(2)
    logs = tuple(math.log10(v) + offset if v > 0 else -math.inf for v in sample.tolist())
    total = float(sample.sum())
    return PathCount(math.log10(total) + offset if total > 0 else -math.inf, logs)
