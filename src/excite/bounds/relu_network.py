"""A fully connected ReLU network as its weights, taken from any module that computes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excite._core.calls import check_finite, pick_output
from excite._core.checks import check_maybe, check_weights, model_errors, shown
from excite._core.intercept.affine import AffineCall, AffineMode, Names
from excite._core.preserve import device_of, eval_mode
from excite._core.wrappers import eagerly, refuse_lazy, unwrap
from excite.errors import InputError, ModelError

Pairs = Sequence[tuple[Tensor, Tensor | None]]
FAR = 1e4  # training points are also tried this many times farther out, on both sides of the origin


@dataclass(frozen=True)
class ReluNetwork:
    """x ↦ W_L (… (W_1 x + b_1)_+ …)_+ + b_L on the CPU in double precision; with `sigmoid`, the sigmoid of that.

    `weights[j]` is (n_{j+1}, n_j), `biases[j]` (n_{j+1},) or None; `precision` is the eps of the numbers it came in.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    precision: float
    sigmoid: bool = False

    def signals(self, x: Tensor) -> list[Tensor]:
        """[h_0, …, h_L] for x (N, n): the inputs of the layers, and what the last one gives (before a sigmoid)."""
        signals = [x]
        for weight, bias in zip(self.weights[:-1], self.biases[:-1]):
            signals.append(F.relu(F.linear(signals[-1], weight, bias)))
        return [*signals, F.linear(signals[-1], self.weights[-1], self.biases[-1])]

    def parameters(self) -> list[Tensor]:
        """Returns weights and biases, layer by layer."""
        return [p for pair in zip(self.weights, self.biases) for p in pair if p is not None]

    def copied(self) -> ReluNetwork:
        """The same network with leaves that ask for gradients."""
        fresh = [[None if p is None else p.clone().requires_grad_() for p in ps] for ps in (self.weights, self.biases)]
        return ReluNetwork(tuple(w for w in fresh[0] if w is not None), tuple(fresh[1]), self.precision, self.sigmoid)


@model_errors
def relu_network(model: nn.Module | Pairs, x: Tensor, *, sigmoid: bool | None = False) -> ReluNetwork:
    """The network that `model` is: a module, or the pairs (weight, bias or None) of its layers in order.

    A module is run in evaluation mode on x (N, ...) and on points far from it: each of its affine calls must be a linear
    layer with a weight of its own that gets the ReLU of what the one before gave, and nothing may follow the last, or a
    `sigmoid` must (None: either; pairs then mean none). Anything else is refused.
    """
    sigmoid = check_maybe(sigmoid, "sigmoid")
    check_finite(x)
    if not isinstance(x, Tensor) or x.dim() < 2 or not x.numel():
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"expected points (N, ...) with at least one point and one feature; got {shape}")
    if isinstance(model, nn.Module):
        pairs, ends = _record(check_weights(model), x, sigmoid)
    else:
        if not isinstance(model, list | tuple):
            raise InputError(f"model: expected a torch.nn.Module or a list of pairs (weight, bias); got {shown(model)}")
        pairs, ends = list(model), bool(sigmoid)
    width = x[0].numel()
    for j, pair in enumerate(pairs):
        if (
            not isinstance(pair, list | tuple)
            or len(pair) != 2
            or not isinstance(pair[0], Tensor)
            or not isinstance(pair[1], Tensor | None)
        ):
            raise InputError(f"expected pairs (weight, bias or None); layer {j + 1} is {shown(pair)}")
        weight, bias = pair
        if weight.dim() != 2 or weight.shape[1] != width:
            raise InputError(f"expected a weight (units, {width}) in layer {j + 1}; got {tuple(weight.shape)}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise InputError(f"expected a bias ({len(weight)},) in layer {j + 1}; got {tuple(bias.shape)}")
        check_finite((weight, *([] if bias is None else [bias])), f"weights in layer {j + 1}")
        width = len(weight)
    if len(pairs) < 2:
        raise ModelError(f"expected a ReLU network with at least two linear layers; got {len(pairs)}")
    precision = max(torch.finfo(w.dtype).eps if w.is_floating_point() else 0.0 for w, _ in pairs)
    return ReluNetwork(
        tuple(w.detach().double().cpu() for w, _ in pairs),
        tuple(None if b is None else b.detach().double().cpu() for _, b in pairs),
        precision,
        ends,
    )


def as_module(pairs: Pairs, *, sigmoid: bool = False) -> nn.Sequential:
    """The module with these weights, double precision, ReLU between layers, and a sigmoid at the end with `sigmoid`."""
    layers: list[nn.Module] = []
    for weight, bias in pairs:
        with torch.random.fork_rng(devices=[]):  # first weights are drawn, and written over
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(weight)
            if bias is not None:
                layer.bias.copy_(bias)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1], *([nn.Sigmoid()] if sigmoid else []))


class LayerRecorder(AffineMode):
    """Every affine call with copies of its input and output, which operations in place do not change."""

    def __init__(self, names: Names):
        super().__init__(names)
        self.calls: list[tuple[AffineCall, Tensor, Tensor]] = []

    def visit(self, call: AffineCall) -> Tensor:
        """Runs the call and records a copy of its input and of its output."""
        entered = call.input.clone()
        output = super().visit(call)
        self.calls.append((call, entered, output.clone()))
        return output


def _record(model: nn.Module, x: Tensor, sigmoid: bool | None) -> tuple[list[tuple[Tensor, Tensor | None]], bool]:
    model = unwrap(model)
    refuse_lazy(model)
    need_real(x)
    names = Names(model)
    recorder = LayerRecorder(names)
    first = next(model.parameters(), None)
    x = x.detach().to(device_of(model), first.dtype if first is not None else x.dtype)
    points = torch.cat([x, FAR * x, -FAR * x])
    with eval_mode(model), eagerly(model), torch.no_grad(), recorder:
        returned = model(points.clone())
    pairs: list[tuple[Tensor, Tensor | None]] = []
    flowing, location = points.flatten(1), "the input"
    owned: set[int] = set()
    for call, entered, output in recorder.calls:
        if call.kind != "linear" or entered.dim() != 2:
            raise _no_chain(f"{call.name} is not a linear layer on vectors")
        if entered.shape != flowing.shape or not torch.equal(entered, flowing):
            raise _no_chain(f"{call.name} does not get {location}")
        if names.parameter(call.weight) is None or call.weight.untyped_storage().data_ptr() in owned:
            raise _no_chain(f"the weight of {call.name} is not a parameter of its own")
        owned.add(call.weight.untyped_storage().data_ptr())
        pairs.append((_matrix(call), call.bias))
        flowing, location = F.relu(output), f"the ReLU of what {call.name} gives"
    if not pairs:
        raise _no_chain("it has no linear layer")
    output, last = pick_output(returned), recorder.calls[-1]
    if output.dim() == 0 or len(output) != len(points) or not output.numel():
        raise _no_chain(f"its output has the shape {tuple(output.shape)} for {len(points)} points")
    output = output.reshape(len(points), -1)
    for ends in (False, True) if sigmoid is None else (sigmoid,):
        if torch.equal(output, last[2].sigmoid() if ends else last[2]):
            return pairs, ends
    description = {True: "the sigmoid of what", False: "what", None: "neither what, nor the sigmoid of what,"}[sigmoid]
    raise _no_chain(
        f"its output is {'not ' * (sigmoid is not None)}{description} its last linear layer {last[0].name} gives"
    )


def need_real(x: Tensor) -> None:
    """Points are also tried farther out; ids must not be, since a model reads them as places in a table."""
    if not x.is_floating_point():
        raise ModelError(f"expected floating-point inputs; got {x.dtype}, such as token ids, which cannot be moved")


def _matrix(call: AffineCall) -> Tensor:
    """The weight as (out, in)."""
    matrix = call.matrix(2)
    if matrix is None:
        raise _no_chain(f"{call.name} is written as {getattr(call.function, '__name__', '')}: use a linear layer")
    return matrix


def _no_chain(why: str) -> ModelError:
    return ModelError(f"expected linear layers with ReLU between them and nothing else; {why}")
