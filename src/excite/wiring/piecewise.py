"""A module that is affine between ReLUs, as the affine maps between them: what the theorems on paths need, of any module that computes one.

Every ReLU, leaky ReLU and the input is a *stage*, a vector of units. The input of a stage is affine in the outputs of the stages before it:
z_k = c_k + Σ_j A_kj h_j, whatever lies between (convolutions, average pooling, normalization in evaluation mode, skips, reshaping). The
matrices are Jacobians, found by automatic differentiation with the stages cut apart, and checked at random values of all stages.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from excite._core.calls import check_finite
from excite._core.checks import check_model, check_tensor, check_weights, model_errors, shown
from excite._core.preserve import eval_mode, preserve_state
from excite._core.wrappers import eagerly, refuse_lazy, unwrap
from excite.errors import InputError, ModelError
from excite.wiring.paths import Edge, Graph

Slopes = tuple[float, float]  # left and right of zero
MAX_UNITS = 20_000
_SIZES = (1.0, -1.0, 100.0)  # of the random values: the largest of two numbers is the other one where signs change
_RELU = {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
_LEAKY = {F.leaky_relu, F.leaky_relu_, torch._C._nn.leaky_relu, torch._C._nn.leaky_relu_}


@dataclass(frozen=True)
class PiecewiseLinear:
    """The stages of a module and the affine maps between them, in float64 on the CPU. Stage 0 is the input, the last one the output.

    Args:
        slopes: The slopes of each stage, left and right of zero; (1, 1) for the input and the output.
        sizes: The number of units of each stage.
        maps: By (stage, earlier stage), the matrix A of z_k = c_k + Σ_j A_kj h_j, (units of k, units of j).
        constants: By stage, c (units,); empty for the input.

    Example:
        >>> net = piecewise_linear(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.randn(4, 2))
        >>> net.sizes
        (2, 3, 1)
    """

    slopes: tuple[Slopes, ...]
    sizes: tuple[int, ...]
    maps: Mapping[tuple[int, int], Tensor]
    constants: tuple[Tensor, ...]

    def signals(self, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs of all stages at x (N, ...), (N, units) each, and their slopes at these points.

        Args:
            x: Points.

        Returns:
            Outputs and slopes by stage.
        """
        start = x.detach().double().cpu().flatten(1)
        if start.shape[1] != self.sizes[0]:
            raise InputError(f"expected points of {self.sizes[0]} numbers; got {tuple(x.shape)}")
        outputs, gates = [start], [torch.ones_like(start)]
        for stage in range(1, len(self.sizes)):
            z = self.constants[stage].expand(len(start), -1)
            for (to, source), matrix in self.maps.items():
                if to == stage:
                    z = z + outputs[source] @ matrix.T
            left, right = self.slopes[stage]
            gates.append(torch.where(z > 0, z.new_tensor(right), z.new_tensor(left)))
            outputs.append(z * gates[-1])
        return outputs, gates

    def gradients(self, gates: Sequence[Tensor]) -> Tensor:
        """The gradient of the (only) output by the input for each pattern of slopes, (N, inputs)."""
        last = len(self.sizes) - 1
        back: dict[int, Tensor] = {last: torch.ones(len(gates[0]), self.sizes[last], dtype=torch.float64)}
        for stage in range(last, 0, -1):
            flowing = back.pop(stage, None)
            for (to, source), matrix in self.maps.items():
                if to == stage and flowing is not None:
                    gradient = (flowing * gates[stage]) @ matrix
                    back[source] = back[source] + gradient if source in back else gradient
        return back.get(0, torch.zeros_like(gates[0]))

    def graph(self, output: int = 0) -> Graph:
        """The network as vertices and edges, for `decompose`: a vertex per unit, "1" for the constants.

        Args:
            output: Which output.

        Returns:
            The graph; weights that are 0 have no edge. Evaluate it at [*x, 1].
        """
        if not 0 <= output < self.sizes[-1]:
            raise InputError(f"output: expected 0 to {self.sizes[-1] - 1}; got {output}")
        last = len(self.sizes) - 1
        weights: dict[Edge, float] = {}
        for (to, source), matrix in self.maps.items():
            for row, column in matrix.nonzero().tolist():
                if to < last or row == output:
                    weights[_name(source, column), _name(to, row)] = float(matrix[row, column])
        for stage in range(1, last + 1):
            for row, value in enumerate(self.constants[stage].tolist()):
                if value and (stage < last or row == output):
                    weights["1", _name(stage, row)] = value
        slopes = {_name(stage, row): self.slopes[stage] for stage in range(1, last) for row in range(self.sizes[stage])}
        inputs = (*(_name(0, row) for row in range(self.sizes[0])), "1")
        return Graph(inputs, _name(last, output), weights, slopes)


def _name(stage: int, unit: int) -> str:
    return f"{stage}.{unit}"


@model_errors
def piecewise_linear(model: nn.Module, x: Tensor) -> PiecewiseLinear:
    """Takes a module that is affine between ReLUs apart into its affine maps.

    It may hold anything that is affine in evaluation mode (linear layers, convolutions, average pooling, normalization, skips,
    reshaping) and ReLU or leaky ReLU; other nonlinear functions are refused.

    Args:
        model: The module; it is run in evaluation mode and left as it was.
        x: Points (N, ...) for its shape; the first is used.

    Returns:
        Stages, matrices and constants.

    Raises:
        ModelError: If the module is not affine between ReLUs, or has more than 20,000 units.

    Example:
        >>> model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(4, 1))
        >>> piecewise_linear(model, torch.randn(1, 1, 6)).sizes
        (6, 8, 1)
    """
    refuse_lazy(check_weights(check_model(model)))
    check_tensor(x, "points")
    check_finite(x)
    if x.dim() < 2 or not len(x):
        raise InputError(f"expected points (N, ...), at least one; got {tuple(x.shape)}")
    twin = copy.deepcopy(unwrap(model)).double().cpu()
    point = x[:1].detach().double().cpu()
    with preserve_state(twin), eval_mode(twin), eagerly(twin):
        cut = _run(twin, point, None)
        net = _matrices(cut)
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(leaf.shape, generator=generator, dtype=torch.float64) for leaf in cut.leaves]
        for size in _SIZES:
            values = [size * value for value in drawn]
            _check(net, _run(twin, values[0], values[1:]), values)
    return net


class _Cut(TorchFunctionMode):
    """Replaces the output of every ReLU by a leaf: its own value, or the one in `replacements`."""

    def __init__(self, replacements: Sequence[Tensor] | None):
        super().__init__()
        self.replacements = replacements
        self.slopes: list[Slopes] = [(1.0, 1.0)]
        self.before: list[Tensor] = []  # inputs of the ReLUs
        self.leaves: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _RELU and func not in _LEAKY:
            return func(*args, **kwargs)
        z = args[0] if args else kwargs["input"]
        left = 0.0 if func in _RELU else float(kwargs.get("negative_slope", args[1] if len(args) > 1 else 0.01))
        at = len(self.before)
        self.before.append(z.clone())  # it may be changed in place
        self.slopes.append((left, 1.0))
        if self.replacements is None:
            leaf = torch.where(z > 0, z, left * z).detach()
        elif at < len(self.replacements) and self.replacements[at].shape == z.shape:
            leaf = self.replacements[at].clone()
        else:
            raise ModelError("the module does not make the same calls for all values of its signals")
        leaf = leaf.requires_grad_()
        self.leaves.append(leaf)
        # A view of the leaf: in-place operations that follow leave the leaf itself alone.
        return leaf * 1


def _run(model: nn.Module, x: Tensor, passed: Sequence[Tensor] | None) -> _Cut:
    cut = _Cut(passed)
    start = x.clone().requires_grad_()
    cut.leaves.append(start)
    with torch.enable_grad(), cut:
        output = model(start * 1)
    if (
        not isinstance(output, Tensor)
        or output.layout != torch.strided
        or output.device.type != "cpu"
        or output.is_complex()
    ):
        raise ModelError(
            f"expected a module that returns a dense tensor of real numbers on its device; got {shown(output)}"
        )
    if not output.dim() or len(output) != 1 or not output.numel():
        raise ModelError(f"expected an output (1, ...) for one point; got shape {tuple(output.shape)}")
    cut.before.append(output.double())
    if not all(bool(z.detach().isfinite().all()) for z in cut.before):
        raise ModelError("the module gives numbers that are not finite")
    cut.slopes.append((1.0, 1.0))
    return cut


def _matrices(cut: _Cut) -> PiecewiseLinear:
    """The Jacobians of the stages' inputs by the leaves, and what remains at zero."""
    sizes = (*(leaf.numel() for leaf in cut.leaves), cut.before[-1].numel())
    if sum(sizes) > MAX_UNITS:
        raise ModelError(f"expected at most {MAX_UNITS:,} units in all; this module has {sum(sizes):,}")
    maps: dict[tuple[int, int], Tensor] = {}
    constants = [torch.zeros(0, dtype=torch.float64)]
    for at, z in enumerate(cut.before):
        stage, flat = at + 1, z.reshape(-1)
        constant = flat.detach().clone()
        if flat.requires_grad:
            rows = torch.eye(flat.numel(), dtype=torch.float64)
            jacobians = torch.autograd.grad(
                flat, cut.leaves[:stage], rows, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
            for source, jacobian in enumerate(jacobians):
                matrix = None if jacobian is None else jacobian.reshape(flat.numel(), -1)
                if matrix is not None and bool(matrix.any()):
                    maps[stage, source] = matrix
                    constant = constant - matrix @ cut.leaves[source].detach().reshape(-1)
        constants.append(constant)
    return PiecewiseLinear(tuple(cut.slopes), sizes, maps, tuple(constants))


def _check(net: PiecewiseLinear, cut: _Cut, values: Sequence[Tensor]) -> None:
    """Compares the inputs of all stages with those of the matrices, at other values of all stages."""
    if len(cut.before) != len(net.sizes) - 1 or tuple(cut.slopes) != net.slopes:
        raise ModelError("the module does not make the same calls for all values of its signals")
    for at, z in enumerate(cut.before):
        stage = at + 1
        expected, size = net.constants[stage].clone(), net.constants[stage].abs()
        for (to, source), matrix in net.maps.items():
            if to == stage:
                expected = expected + matrix @ values[source].reshape(-1)
                size = size + matrix.abs() @ values[source].reshape(-1).abs()
        if bool(((z.detach().reshape(-1) - expected).abs() > 1e-9 * (1 + size)).any()):
            position = "the output" if stage == len(net.sizes) - 1 else f"the input of ReLU {stage}"
            raise ModelError(
                f"{position} is not affine in what the ReLUs before it give: expected affine layers, average pooling, normalization in "
                "evaluation mode and skips between ReLUs, and nothing else (no sigmoid at the end either)"
            )
