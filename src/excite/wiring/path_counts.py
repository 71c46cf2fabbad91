"""How many paths lead through a model, from a number of its input to a number of its output; in networks of any size.

Dynamic programming over the graph: with every weight 1, every activation the identity and every input 1, what arrives at a
vertex is the number of paths to it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from excite._core.calls import Batch, Pick, check_finite
from excite._core.checks import check_flag, check_model, model_errors
from excite._core.wrappers import refuse_lazy, unwrap
from excite.errors import ModelError
from excite.wiring.channels.signals import module_of
from excite.wiring.export import ExportFailed, exported
from excite.wiring.operators.movement import REPEATS, SAME, VIEWS
from excite.wiring.propagation.schema import bind, is_inplace, name_of

_SAME = ("relu", "leaky_relu", "abs", "prelu", "_prelu_kernel", "dropout", "feature_dropout", "neg", "detach",
         "batch_norm", "layer_norm", "group_norm", "instance_norm")  # fmt: skip
_CONV = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_POOL = ("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d")
_ADAPTIVE = ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d")
_LARGE = 2.0**400  # beyond, counts are divided by a power of two


@dataclass(frozen=True)
class PathCount:
    """`log10` of the number of paths of one sample, to all outputs together; `log10_by_output` has one number an output."""

    log10: float
    log10_by_output: tuple[float, ...]

    @property
    def total(self) -> float:
        """The number itself: exact below 2⁵³, to about 14 digits above, infinite beyond 10³⁰⁸."""
        found = 10.0**self.log10 if self.log10 < 308 else math.inf
        return float(round(found)) if found < 2**52 else found

    def __str__(self) -> str:
        return f"{self.total:.0f} paths" if self.total < 1e9 else f"10^{self.log10:.2f} paths"


@dataclass(frozen=True)
class _Counts:
    """values · 2^power."""

    values: Tensor
    power: int = 0

    def at(self, power: int) -> Tensor:
        return self.values * 2.0 ** (self.power - power)

    def through(self, change: Callable[[Tensor], Tensor]) -> _Counts:
        found, power = change(self.values), self.power
        if found.numel() and float(found.max()) > _LARGE:
            step = math.frexp(float(found.max()))[1]
            found, power = found * 2.0**-step, power + step
        return _Counts(found, power)


@model_errors
def path_count(model: nn.Module, example: Batch, *, biases: bool = False, output: Pick = None) -> PathCount:
    """The number of paths of the computation graph of `model` on one sample of `example`.

    Vertices are the numbers that layers make, so a convolution has a vertex for every place; weights that are shared
    count once for every place. A pooling window joins all its elements. With `biases`, every bias is one more input,
    as in the paper. Normalizations count as one edge per number, as if their statistics were constants. The count covers
    affine layers, (leaky) ReLU, pooling, sums, concatenations and normalizations; anything else is refused by name.
    """
    model = unwrap(check_model(model))
    refuse_lazy(model)
    check_flag(biases, "biases")
    check_finite(example, "values in the example")
    try:
        graph = exported(model, example, output, only_output=True)
    except ExportFailed as failure:
        raise ModelError(f"paths cannot be counted: torch.export failed: {failure}") from failure
    values: dict[torch.fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            if node.name in graph.parameters:
                values[node] = torch.ones(value.shape, dtype=torch.float64)
            elif node.name in graph.constants:
                values[node] = graph.constants[node.name].cpu()
            elif isinstance(value, Tensor):
                if not value.is_floating_point():
                    raise ModelError("paths cannot be counted from whole numbers (token ids): they enter by a table")
                values[node] = _Counts(torch.ones(value.shape, dtype=torch.float64))
            else:
                values[node] = value
        elif node.op == "call_function":
            values[node] = _call(node, values, biases)
        elif node.op == "output":
            return _result(_read(node.args, values))
    raise ModelError("paths cannot be counted: the graph of the model has no output")


def _result(found: Any) -> PathCount:
    while isinstance(found, tuple | list):
        found = found[0]
    if not isinstance(found, _Counts):
        return PathCount(-math.inf, ())
    if not found.values.dim():
        raise ModelError(
            "paths cannot be counted to one number for the whole batch: pick an output with one row per sample by output="
        )
    one = found.values[0].reshape(-1)
    offset = found.power * math.log10(2)
    logs = tuple(math.log10(v) + offset if v > 0 else -math.inf for v in one.tolist())
    total = float(one.sum())
    return PathCount(math.log10(total) + offset if total > 0 else -math.inf, logs)


def _read(argument: Any, values: dict[torch.fx.Node, Any]) -> Any:
    if isinstance(argument, torch.fx.Node):
        return values[argument]
    if isinstance(argument, tuple | list):
        return type(argument)([_read(part, values) for part in argument])
    return argument


def _call(node: torch.fx.Node, values: dict[torch.fx.Node, Any], biases: bool) -> Any:
    args = tuple(_read(list(node.args), values))
    kwargs = {key: _read(part, values) for key, part in node.kwargs.items()}
    if node.target is operator.getitem:
        return args[0][args[1]]
    if not node.users and not is_inplace(node.target):
        return None
    flat = [leaf for part in (*args, *kwargs.values()) for leaf in (part if isinstance(part, tuple | list) else [part])]
    if not any(isinstance(leaf, _Counts) for leaf in flat):
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]
    name = name_of(node.target)
    found = _count(name, bind(node.target, args, kwargs), node, biases)
    if found is None:
        where = module_of(node)
        raise ModelError(f"paths through {name} are not known" + (f" (in {where})" if where else ""))
    return found


def _count(name: str, a: SimpleNamespace, node: torch.fx.Node, biases: bool) -> Any:
    x: Any = a.args[0] if a.args else None
    if name in _SAME:
        shift = getattr(a, "bias", None) if biases and name.endswith("norm") else None
        return x if shift is None else _sum([x, _Counts(torch.ones_like(x.values))])
    if name in VIEWS or name in SAME or name in REPEATS:
        # The numbers lie in memory as they come: a view of the original may need a copy here.
        op = torch.ops.aten.reshape.default if name == "view" else a.target
        moved = x.values.clone() if name in SAME else op(x.values, *a.args[1:], **a.kwargs)
        if isinstance(moved, tuple | list):
            return tuple(_Counts(part, x.power) for part in moved)
        return _Counts(moved, x.power)
    if name == "linear" or name in _CONV:
        return _affine(name, a, biases)
    if name in ("matmul", "mm", "addmm") and sum(isinstance(v, _Counts) for v in a.args) == 1:
        return _product(name, a, biases)
    if name in ("add", "sub", "rsub"):
        parts = [part for part in (a.self, a.other) if isinstance(part, _Counts)]
        fixed = [part for part in (a.self, a.other) if isinstance(part, Tensor)] if biases else []
        return _sum([*parts, *(_Counts(torch.ones_like(part, dtype=torch.float64)) for part in fixed)])
    if name in ("mul", "multiply", "div", "divide", "true_divide"):
        return _scaled(a)
    if name in ("cat", "concat", "concatenate", "stack"):
        parts = [p if isinstance(p, _Counts) else _Counts(torch.zeros_like(p, dtype=torch.float64)) for p in x]
        power = max(p.power for p in parts)
        join = torch.stack if name == "stack" else torch.cat
        return _Counts(join([p.at(power) for p in parts], getattr(a, "dim", 0) or 0), power)
    if name in ("mean", "sum"):
        axes = a.dim if getattr(a, "dim", None) else tuple(range(x.values.dim()))
        return x.through(lambda v: v.sum(axes, keepdim=bool(getattr(a, "keepdim", False))))
    if name in _POOL:
        return _pool(name, a)
    if name in _ADAPTIVE:
        return _adaptive(x, a.output_size)
    return None


def _affine(name: str, a: SimpleNamespace, biases: bool) -> _Counts | None:
    """The same call, with weights of one: they are ones already, since all parameters are."""
    if not isinstance(a.weight, Tensor) or not isinstance(a.input, _Counts):
        return None
    weight = torch.ones_like(a.weight, dtype=torch.float64)
    rest = a.args[3:] if name != "linear" else ()
    found = a.input.through(lambda v: a.target(v, weight, None, *rest))
    if biases and a.bias is not None:
        return _sum([found, _Counts(torch.ones_like(found.values))])
    return found


def _product(name: str, a: SimpleNamespace, biases: bool) -> _Counts:
    left, right = (a.args[1], a.args[2]) if name == "addmm" else (a.args[0], a.args[1])
    if isinstance(left, _Counts):
        found = left.through(lambda v: v @ torch.ones_like(right, dtype=torch.float64))
    else:
        found = right.through(lambda v: torch.ones_like(left, dtype=torch.float64) @ v)
    return _sum([found, _Counts(torch.ones_like(found.values))]) if name == "addmm" and biases else found


def _scaled(a: SimpleNamespace) -> _Counts | None:
    """A product with a parameter or a constant is an edge of its own; one of two signals is no feedforward network."""
    if isinstance(a.self, _Counts) == isinstance(a.other, _Counts):
        return None
    x, factor = (a.self, a.other) if isinstance(a.self, _Counts) else (a.other, a.self)
    if isinstance(a.other, _Counts) and a.op.startswith(("div", "true")):
        return None
    return (
        x
        if not isinstance(factor, Tensor)
        else _Counts(x.values * torch.ones_like(factor, dtype=torch.float64), x.power)
    )


def _sum(parts: list[_Counts]) -> _Counts:
    power = max(p.power for p in parts)
    total = parts[0].at(power)
    for part in parts[1:]:
        total = total + part.at(power)
    return _Counts(total, power)


def _pool(name: str, a: SimpleNamespace) -> _Counts | None:
    """The sum over each window: all its elements lead on. Padding leads nowhere."""
    if any(d != 1 for d in _tuple(getattr(a, "dilation", 1))) or a.ceil_mode:
        return None
    n = int(name[-2])
    size, pad = _tuple(a.kernel_size, n), _tuple(a.padding, n)
    stride = _tuple(a.stride, n) if a.stride not in (None, [], ()) else size
    pool = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[n]
    x: _Counts = a.args[0]
    return x.through(lambda v: pool(v, size, stride, pad, count_include_pad=True) * math.prod(size))


def _adaptive(x: _Counts, size: Any) -> _Counts:
    sizes = _tuple(size, 1)

    def change(v: Tensor) -> Tensor:
        for k, out in enumerate(sizes):
            axis = v.dim() - len(sizes) + k
            into = v.shape[axis]
            windows = [(i * into // out, -(-(i + 1) * into // out)) for i in range(out)]
            v = torch.stack([v.narrow(axis, low, high - low).sum(axis) for low, high in windows], axis)
        return v

    return x.through(change)


def _tuple(value: Any, n: int = 1) -> tuple[int, ...]:
    numbers = tuple(value) if isinstance(value, tuple | list) else (value,)
    return numbers * n if len(numbers) == 1 and n > 1 else numbers
