"""The operators of a model as bounds see them: affine ones, which are transposed, and activations, which are relaxed.

A tape is the graph of one forward pass of a fixed number of rows, below autograd, in float64. Everything that bounds need from an
affine operator is its value at zero and its transpose, which autograd has: no operator needs a rule of its own. Which operators
are affine is said by the operator table (`excite.wiring.operators`, column `pieces`).
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg

from excite._core.calls import Pick, pick_output
from excite._core.checks import Norm
from excite.errors import ModelError
from excite.margin.certificates.relaxations import ACTIVATIONS, ActivationShape
from excite.margin.problem import length
from excite.wiring.propagation.interpreter import lookup
from excite.wiring.propagation.schema import bind, name_of

_NORMALIZATIONS = (
    "native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm",
    "miopen_batch_norm",
)  # fmt: skip
_SAME = ("detach", "alias", "_to_copy", "clone", "contiguous")  # they may change the precision, which bounds do not
_POOLS = ("max_pool2d_with_indices", "max_pool3d_with_indices")
# Affine with coefficients that are not negative: a deviation goes through them as a value does.
_POSITIVE = frozenset(
    (
        *_SAME, "view", "_unsafe_view", "transpose", "permute", "t", "squeeze", "unsqueeze", "select", "slice", "flip",
        "roll", "split", "split_with_sizes", "unbind", "expand", "repeat", "unfold", "pixel_shuffle", "pixel_unshuffle",
        "channel_shuffle", "index_select", "_reshape_alias", "as_strided", "index", "cat", "stack", "constant_pad_nd",
        "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "gather", "_unsafe_index",
        "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_nearest1d",
        "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "mean", "sum", "cumsum",
        "add", "diagonal", "rot90", "col2im", "im2col",
    )
)  # fmt: skip
# Affine with coefficients that are arguments: a deviation goes through them with the absolute values.
_WEIGHTED = frozenset(("convolution", "addmm", "mm", "bmm", "baddbmm", "mv", "addmv", "linear", "mul", "div"))


@dataclass(frozen=True)
class TapeStep:
    """One operator that depends on the input: `inputs` are the nodes it reads of which that holds, without repetitions."""

    node: Node
    name: str
    inputs: tuple[Node, ...]
    activation: ActivationShape | None = None
    pool: bool = False

    @property
    def affine(self) -> bool:
        """Whether it is an affine function of its inputs."""
        return self.activation is None and not self.pool


class OperatorTape:
    """The operators of `model` on `rows` inputs like x (N, ...), in order; `steps` by the node of the graph.

    Args:
        model: in evaluation mode.
        x: inputs, of which the first is repeated.
        output: which part of what the model returns is the output.
        rows: how many inputs go through at a time. Rows must not depend on each other.

    Raises:
        ModelError: if there is an operator without a bound, by name.
    """

    def __init__(self, model: nn.Module, x: Tensor, output: Pick, rows: int):
        from torch.func import functionalize
        from torch.fx.experimental.proxy_tensor import make_fx

        example = x[:1].expand(rows, *x.shape[1:]).contiguous()
        with torch.no_grad():
            try:
                graph = make_fx(functionalize(lambda z: pick_output(model(z), output)))(example)
            except Exception as error:  # whatever a trace meets: the model has no graph, which is an answer
                line = (str(error).splitlines() or [""])[0]
                raise ModelError(f"no bound known: the model cannot be traced: {line}") from error
        graph.graph.eliminate_dead_code()
        self.rows, self.device = rows, x.device
        self.shapes: dict[Node, Any] = {}
        self.steps: dict[Node, TapeStep] = {}
        self._static: dict[Node, Any] = {}
        self._norms: dict[tuple[Node, Norm], Tensor] = {}
        for node in graph.graph.nodes:
            self._read(node, graph)
        self._affine = {self.input}  # what is an affine function of the input, without an activation before it
        for step in self.steps.values():
            if step.affine and all(node in self._affine for node in step.inputs):
                self._affine.add(step.node)

    def is_affine(self, node: Node) -> bool:
        """Whether there is no activation between the input and `node`."""
        return node in self._affine

    def values(self, x: Tensor) -> dict[Node, Any]:
        """Everything that depends on the input, at as many inputs x as there are rows, in float64."""
        result: dict[Node, Any] = {self.input: x.double()}
        with torch.no_grad():
            for step in self.steps.values():
                result[step.node] = self.call(step, result)
        return result

    def coefficient_norms(self, node: Node, norm: Norm) -> Tensor:
        """(1, ...): for each element of an affine function of the input, the norm of its coefficients."""
        if (node, norm) not in self._norms:
            shape = self.shapes[node][1:]
            size = math.prod(shape)
            norms = []
            for chunk in torch.arange(size, device=self.device).split(self.rows):
                units = F.one_hot(chunk, size).double().reshape(-1, *shape)
                norms.append(length(self.affine_rows(node, units)[0][self.input], norm))
            self._norms[node, norm] = torch.cat(norms).reshape(1, *shape)
        return self._norms[node, norm]

    def affine_rows(self, node: Node, coefficients: Tensor) -> tuple[dict[Node, Tensor], Tensor]:
        """Σ coefficients (R, ...) · value of `node`, as a function of the input and of the results of activations before it.

        Returns the coefficients of those, by node, and the constant (R,); R is at most the number of rows.
        """
        count = len(coefficients)
        pending: dict[Node, Any] = {
            node: F.pad(coefficients, (0, 0) * (coefficients.dim() - 1) + (0, self.rows - count))
        }
        constant = coefficients.new_zeros(self.rows)
        sources: dict[Node, Tensor] = {}
        steps = list(self.steps.values())
        last = next((i for i, step in enumerate(steps) if step.node is node), -1)
        for step in reversed(steps[: last + 1]):
            if step.node not in pending:
                continue
            weights = pending.pop(step.node)
            if step.name == "getitem":
                add_part(pending.setdefault(step.inputs[0], {}), step.node.args[1], weights)
            elif not step.affine:
                sources[step.node] = weights[0][:count] if isinstance(weights, dict) else weights[:count]
            else:
                back, added = self.transpose(step, weights)
                constant = constant + added
                for input_node, value in back.items():
                    add_part(pending, input_node, value)
        if self.input in pending:
            sources[self.input] = pending[self.input][:count]
        return sources, constant[:count]

    def _read(self, node: Node, graph: torch.fx.GraphModule) -> None:
        if node.op == "placeholder":
            self.input, self.shapes[node] = node, tuple(node.meta["val"].shape)
        elif node.op == "get_attr":
            self._static[node] = _exact(getattr(graph, str(node.target)))
        elif node.op == "output":
            last = node.args[0]
            if not isinstance(last, Node) or last not in self.shapes:
                raise ModelError("no bound known: the output does not depend on the input")
            self.output: Node = last
        elif node.op == "call_function":
            self._call(node)

    def _call(self, node: Node) -> None:
        inputs = tuple(dict.fromkeys(input_node for input_node in node.all_input_nodes if input_node in self.shapes))
        if not inputs:
            with torch.no_grad():
                self._static[node] = _exact(node.target(*self._known(node.args), **self._known(node.kwargs)))  # type: ignore[operator]
            return
        if node.target is operator.getitem:
            self.shapes[node] = self.shapes[inputs[0]][node.args[1]]
            self.steps[node] = TapeStep(node, "getitem", inputs)
            return
        name = name_of(node.target)
        step = TapeStep(node, name, inputs, ACTIVATIONS.get(name), name in _POOLS)
        if step.affine:
            _check_affine(step)
        elif len(inputs) > 1 or (step.activation is not None and not step.activation.applies(*node.args[1:])):
            raise ModelError(
                f"no bound known for {name} with these arguments: certify='lipschitz', or leave certify out"
            )
        self.steps[node] = step
        with torch.no_grad():
            zeros = {
                input_node: torch.zeros(self.shapes[input_node], dtype=torch.float64, device=self.device)
                for input_node in inputs
            }
            result = self.call(step, zeros)
        self.shapes[node] = _shape(result)
        shape = self.shapes[node][0] if isinstance(self.shapes[node], list) else self.shapes[node]
        if not step.affine and (not shape or shape[0] != self.rows):
            raise ModelError(f"no bound known: {name} has no row per input, but the shape {shape}")

    def _known(self, arguments: Any, values: dict[Node, Any] | None = None) -> Any:
        return map_arg(arguments, lambda node: self._static[node] if node in self._static else (values or {})[node])

    def call(self, step: TapeStep, values: dict[Node, Any], *, magnitude: bool = False) -> Any:
        """The operator at `values` of its inputs; `magnitude`: the affine operator with absolute coefficients, without constant."""
        if step.name == "getitem":
            return values[step.inputs[0]][step.node.args[1]]
        if step.name in _NORMALIZATIONS:
            return (
                _normalized(
                    bind(step.node.target, self._known(step.node.args, values), self._known(step.node.kwargs)),
                    magnitude,
                ),
            )
        if not magnitude:
            if step.name in _SAME:
                return values[step.inputs[0]].clone()
            return step.node.target(*self._known(step.node.args, values), **self._known(step.node.kwargs, values))  # type: ignore[operator]
        return self._magnitude(step, values)

    def _magnitude(self, step: TapeStep, values: dict[Node, Any]) -> Any:
        if step.name == "neg":
            return values[step.inputs[0]]
        if step.name in ("sub", "rsub", "add"):
            a = bind(step.node.target, step.node.args, dict(step.node.kwargs))
            first, other = (
                values.get(operand, 0.0) if isinstance(operand, Node) else 0.0 for operand in (a.self, a.other)
            )
            scale = abs(float(a.alpha))
            result = first + scale * other if step.name != "rsub" else other + scale * first
            return result + torch.zeros(self.shapes[step.node], dtype=torch.float64, device=self.device)
        if step.name not in _POSITIVE and step.name not in _WEIGHTED:
            raise ModelError(f"no interval bound known for {step.name}: certify='lipschitz', or leave certify out")
        statics = {node: _magnitudes(self._static[node]) for node in step.node.all_input_nodes if node in self._static}
        args, kwargs = step.node.args, step.node.kwargs
        if step.name in ("mul", "div"):
            args = tuple(abs(arg) if isinstance(arg, int | float) else arg for arg in args)

        def at(terms: dict[Node, Any]) -> Any:
            return step.node.target(*map_arg(args, terms.__getitem__), **map_arg(kwargs, terms.__getitem__))  # type: ignore[operator]

        if step.name in _POSITIVE:  # indices must stay what they are
            statics = {node: self._static[node] for node in statics}
        return _minus(
            at(statics | values), at(statics | {node: torch.zeros_like(values[node]) for node in step.inputs})
        )

    def transpose(self, step: TapeStep, coefficients: Tensor | dict[int, Tensor]) -> tuple[dict[Node, Tensor], Tensor]:
        """Coefficients of the inputs of an affine step, and the constant (rows,), from those of its result."""
        with torch.enable_grad():
            zeros = {input_node: self._zeros(self.shapes[input_node]) for input_node in step.inputs}
            result = self.call(step, zeros)
        if isinstance(coefficients, dict):
            places = list(coefficients)
            results, weights = [result[i] for i in places], [coefficients[i] for i in places]
        else:
            results, weights = [result], [coefficients]
        leaves = [zeros[input_node] for input_node in step.inputs]
        gradients = iter(torch.autograd.grad(results, leaves, weights, allow_unused=True))
        back = {}
        for input_node in step.inputs:
            gradient = next(gradients)
            if gradient is not None:
                back[input_node] = gradient
        constant = sum((w * r.detach()).reshape(self.rows, -1).sum(1) for w, r in zip(weights, results))
        return back, torch.as_tensor(constant)

    def _zeros(self, shape: Any) -> Any:
        return torch.zeros(shape, dtype=torch.float64, device=self.device, requires_grad=True)


def add_part(parts: dict[Any, Any], key: Any, value: Tensor) -> None:
    """Adds a value to what is there."""
    parts[key] = parts[key] + value if key in parts else value


def _check_affine(step: TapeStep) -> None:
    """Refuses an operator that is not affine in what depends on the input."""
    row = lookup(step.node.target)
    pieces = None if row is None else row.pieces
    linear = pieces is not None and (pieces.linearity == "linear" or step.name == "div")
    if pieces is None or not linear:
        raise ModelError(
            f"no bound known for {step.name.strip('_')}: pick the output before it with output=, certify='lipschitz', or leave "
            "certify out"
        )
    a = bind(step.node.target, step.node.args, dict(step.node.kwargs))
    why = pieces.unless(a) if pieces.unless is not None else None
    if step.name == "div" and getattr(a, "rounding_mode", None):
        why = "rounds"
    dynamic = set(step.inputs)

    def moves(name: str) -> bool:
        argument = getattr(a, name, None)
        return isinstance(argument, Node) and argument in dynamic

    if sum(any(moves(name) for name in group) for group in pieces.factors) > 1:
        why = "multiplies two signals with each other"
    if any(moves(name) for name in pieces.fixed):
        why = "takes as a coefficient what depends on the input"
    if why:
        raise ModelError(f"no bound known for {step.name.strip('_')}: it {why}")


def _normalized(a: SimpleNamespace, magnitude: bool) -> Tensor:
    view = (-1, *[1] * (a.input.dim() - 2))
    eps = getattr(a, "eps", getattr(a, "epsilon", 1e-5))
    scale = (a.running_var + eps).rsqrt()
    scale = (scale if a.weight is None else scale * a.weight).view(view)
    if magnitude:
        return a.input * scale.abs()  # type: ignore[no-any-return]
    shifted = (a.input - a.running_mean.view(view)) * scale
    return shifted if a.bias is None else shifted + a.bias.view(view)  # type: ignore[no-any-return]


def _exact(value: Any) -> Any:
    """Floating-point tensors in float64."""
    if isinstance(value, tuple | list):
        return type(value)(_exact(item) for item in value)
    return value.detach().double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _magnitudes(value: Any) -> Any:
    return value.abs() if isinstance(value, Tensor) and value.is_floating_point() else value


def _minus(first: Any, other: Any) -> Any:
    return [a - b for a, b in zip(first, other)] if isinstance(first, tuple | list) else first - other


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else [tuple(item.shape) for item in value]
