"""A guaranteed upper bound on the Lipschitz constant of a model, from the norms of its parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from excite._core.calls import Batch, Pick, batch_size, check_finite, pick_output, tensors
from excite._core.checks import check_model, check_weights, model_errors, parse_norm
from excite._core.intercept.affine import clean_path
from excite._core.preserve import eval_mode
from excite._core.wrappers import unwrap
from excite.errors import InputError, ModelError
from excite.wiring.export import Exported, ExportFailed, does_not_run, exported, resized, run
from excite.wiring.propagation.interpreter import Interpreter
from excite.wiring.propagation.sensitivity import NO_BOUND, LipschitzContext, LipschitzNorm, Sensitivity

_NORMS: tuple[LipschitzNorm, ...] = ("inf", "2")


@dataclass(frozen=True)
class LipschitzBound:
    """An upper bound on a Lipschitz constant: ‖f(x) − f(y)‖ ≤ value · ‖x − y‖ for all inputs.

    Attributes:
        value: The bound.
        norm: The norm of inputs and outputs, "inf" or "2".
        terms: The parts of the model in order of execution, each with the factor by which it multiplies the bound; parts
            with factor one are left out. A sum or a concatenation of branches has the bound from the input up to there.
        why: How the terms combine.

    Example:
        >>> bound = excite.lipschitz.bound(nn.Linear(2, 1, bias=False), torch.zeros(1, 2), norm="2")
        >>> len(bound.terms)
        1
    """

    value: float
    norm: str
    terms: tuple[tuple[str, float], ...]
    why: str

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        lines = [f"Lipschitz constant at most {self.value:.6g} in the {self.norm}-norm: {self.why}"]
        width = max((len(term) for term, _ in self.terms), default=0)
        return "\n".join([*lines, *(f"  {term.ljust(width)}  {factor:.6g}" for term, factor in self.terms)])


@model_errors
def bound(model: nn.Module, example: Batch, norm: object = "inf", *, output: Pick = None) -> LipschitzBound:
    """Computes an upper bound on the global Lipschitz constant of a model in evaluation mode.

    Inputs and outputs of one sample are flattened. In the 2-norm the constants of the layers are multiplied and branches
    are added. In the infinity norm each element is followed on its own, max |W_L| ··· |W_1| 1, which is never more than the
    product. Since ‖x‖_∞ ≤ ‖x‖₂ ≤ √n ‖x‖_∞, either bound also follows from the other, times √(inputs) or √(outputs): the
    smaller one is returned. Guaranteed up to rounding, rarely tight.

    Args:
        model: A model whose operators have Lipschitz constants in the operator table.
        example: A batch as the model takes it; only its shapes matter.
        norm: "inf" or "2".
        output: Selects the output of a model that returns a tuple or a dict.

    Returns:
        The bound, with the factor of each part of the model.

    Raises:
        ModelError: If no bound is known for an operator, as for attention or layer normalization; it is named.
        InputError: If the example has no floating-point input.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> print(excite.lipschitz.bound(model, torch.zeros(2, 4), norm="2"))
    """
    check_weights(check_model(model))
    name: LipschitzNorm = "2" if parse_norm(norm, ("inf", "2")) == "2" else "inf"
    check_finite(example, "values in the example")
    if not any(leaf.is_floating_point() for leaf in tensors(example)):
        raise InputError("expected floating-point inputs; integer inputs have no Lipschitz constant")
    model = unwrap(model)
    with eval_mode(model):
        try:
            graph = exported(model, example, output, only_output=True)
        except ExportFailed as failure:
            _explain(model, example, output)
            raise ModelError(f"no Lipschitz bound known: torch.export failed: {failure}") from failure
        parameters: dict[str, Tensor] = {
            node: model.get_parameter(path) for node, path in _paths(model, graph.parameters).items()
        }
        results = {source: propagate(graph, parameters, source) for source in _NORMS}
    shape = results[name][0].shape
    if shape[:1] != (2,):  # the graph was made for two samples
        raise ModelError(
            f"expected an output with one row per sample; for two samples got {shape}: pick it with output="
        )
    size = batch_size(example)
    inputs = sum(
        leaf[0].numel() if leaf.dim() and len(leaf) == size else leaf.numel()
        for leaf in tensors(example)
        if leaf.is_floating_point()
    )
    outputs = math.prod(shape[1:])
    smallest = min((_bound(name, source, *results[source], inputs, outputs) for source in (name, *_NORMS)), key=float)
    if not math.isfinite(smallest.value):
        raise ModelError(
            f"no finite Lipschitz bound: the product over the parts is {smallest.value}; the weights or buffers are too large, or not finite"
        )
    return smallest


class LipschitzInterpreter(Interpreter):
    """Propagates how far tensors can move; parameters are keyed by the names of their placeholders."""

    column = "lipschitz"
    refusal = NO_BOUND
    followed = (Sensitivity,)
    context: LipschitzContext

    def __init__(self, context: LipschitzContext, parameters: dict[str, Tensor]):
        super().__init__(context)
        self._parameters = parameters

    def parameter(self, node: torch.fx.Node, path: str) -> Tensor:
        """Returns the parameter's value, on the CPU."""
        return self._parameters[node.name].detach().cpu()

    def input(self, node: torch.fx.Node) -> Any:
        """Returns the sensitivity of the model's input to itself: 1, or 0 for integers."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return value
        factor, shape = float(value.is_floating_point()), tuple(value.shape)
        deviation = torch.full(shape, factor, dtype=torch.float64) if self.context.norm == "inf" else None
        return Sensitivity(factor, shape, deviation)


def propagate(
    graph: Exported, parameters: dict[str, Tensor], norm: LipschitzNorm
) -> tuple[Sensitivity, tuple[tuple[str, float], ...], bool]:
    """How far the first output of the graph can move, the terms of that, and whether branches were added."""
    context = LipschitzContext(norm)
    result = LipschitzInterpreter(context, parameters).run(graph)
    while isinstance(result, tuple | list):
        result = result[0]
    if not isinstance(result, Sensitivity):  # it does not depend on the input
        result = Sensitivity(0.0, tuple(getattr(result, "shape", ())))
    return result, tuple(context.terms), context.branches


def _bound(
    norm: LipschitzNorm,
    source: LipschitzNorm,
    output: Sensitivity,
    terms: tuple[tuple[str, float], ...],
    branches: bool,
    inputs: int,
    outputs: int,
) -> LipschitzBound:
    """The bound in `norm` that follows from the one in the norm `source`."""
    factors = "the norms of its parts" if source == "2" else "what each part does to the largest deviation"
    why = f"the product of {factors}" + (", with sums over branches" if branches else "")
    if norm == source:
        return LipschitzBound(output.factor, norm, terms, why)
    term, root = (
        (f"√{inputs} inputs", math.sqrt(inputs)) if norm == "inf" else (f"√{outputs} outputs", math.sqrt(outputs))
    )
    return LipschitzBound(output.factor * root, norm, (*terms, (term, root)), f"{why}, from the {source}-norm")


def _explain(model: nn.Module, example: Batch, output: Pick) -> None:
    """Raise what is wrong with the output or the example, if that is why the export failed."""
    two = resized(example, 2)
    try:
        returned = run(model, two)
    except Exception as error:
        raise does_not_run(error, two) from error
    pick_output(returned, output)


def _paths(model: nn.Module, parameters: dict[str, str]) -> dict[str, str]:
    """Placeholders to the paths under which the model holds them, wrappers of compiled parts included."""
    own = {clean_path(path): path for path, _ in model.named_parameters()}
    return {node: own[path] for node, path in parameters.items()}
