"""Normalizations that a model writes out: x / √(mean x² + ε), and the same of x − mean x."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from excite.wiring.operators.movement import SAME
from excite.wiring.propagation.schema import bind, module_of, name_of

_COPIES = frozenset((*SAME, "expand", "expand_as"))
_PRODUCTS, _QUOTIENTS = ("mul", "multiply"), ("div", "divide", "true_divide")
Form = Literal["mean", "clamped", "other"]


@dataclass(frozen=True)
class WrittenNorm:
    """One normalization: the product or quotient that ends it, and what it is.

    Attributes:
        node: The call that returns the normalized numbers.
        top: The argument of that call that is normalized, its number.
        axes: The axes along which the statistics are taken.
        op: "rms_norm", or "layer_norm" where the mean is subtracted first.
        eps: What is added to the variance.
        form: "mean": x / √(mean x² + ε); "clamped": x / max(‖x‖, ε), which has no ε but near zero; "other": the ε stands
            elsewhere, or the variance is not a mean of squares.
        inner: The calls that compute the statistics.
    """

    node: torch.fx.Node
    top: int
    axes: tuple[int, ...]
    op: str
    eps: float
    form: Form
    inner: frozenset[torch.fx.Node]


@dataclass(frozen=True)
class _Statistic:
    """√v or v of a tensor x, with the calls between."""

    x: torch.fx.Node
    axes: tuple[int, ...]
    nodes: tuple[torch.fx.Node, ...]
    eps: float = 0.0
    form: Form = "mean"
    centred: bool = False

    def then(self, *nodes: torch.fx.Node, **changes: Any) -> _Statistic:
        return replace(self, nodes=(*self.nodes, *nodes), **changes)


@dataclass
class WrittenNorms:
    """The written normalizations of a graph, by the call that ends them; `inner` has the calls inside all of them."""

    norms: dict[torch.fx.Node, WrittenNorm] = field(default_factory=dict)
    inner: dict[torch.fx.Node, WrittenNorm] = field(default_factory=dict)


def find_written_norms(nodes: Iterable[torch.fx.Node]) -> WrittenNorms:
    """Returns the normalizations in a graph that are made of elementary operations.

    Args:
        nodes: The nodes of the graph in order. A normalization counts if nothing else reads its statistics.
    """
    result = WrittenNorms()
    for node in nodes:
        norm = _norm(node)
        if norm is not None:
            result.norms[node] = norm
            result.inner |= dict.fromkeys(norm.inner, norm)
    return result


def _norm(node: torch.fx.Node) -> WrittenNorm | None:
    op = _op(node)
    if op not in (*_PRODUCTS, *_QUOTIENTS) or len(node.args) < 2:
        return None
    for top, bottom in ((0, 1), (1, 0)) if op in _PRODUCTS else ((0, 1),):
        statistic = _inverse(node.args[bottom]) if op in _PRODUCTS else _root(node.args[bottom])
        if statistic is None or not isinstance(node.args[top], torch.fx.Node):
            continue
        x, casts = _source(node.args[top])
        centre = _centred(x)
        inner = set(statistic.nodes) | ({*centre[1:]} if centre is not None else set())
        if centre is not None and (statistic.x is x or (statistic.centred and statistic.x is centre[0])):
            inner |= {x, *casts}
        elif statistic.x is not x or statistic.centred:
            continue
        if any(
            user not in inner and user is not node for node_group in inner for user in node_group.users if user.users
        ):
            continue
        norm_name = "layer_norm" if centre is not None else "rms_norm"
        return WrittenNorm(node, top, statistic.axes, norm_name, statistic.eps, statistic.form, frozenset(inner))
    return None


def _op(value: Any) -> str:
    known = isinstance(value, torch.fx.Node) and value.op == "call_function" and hasattr(value.target, "_schema")
    return name_of(value.target) if known else ""


def _source(value: Any) -> tuple[torch.fx.Node, tuple[torch.fx.Node, ...]]:
    """The tensor before casts, copies and expansions, and the nodes of these."""
    passed = []
    while _op(value) in _COPIES:
        passed.append(value)
        value = value.args[0]
    return value, tuple(passed)


def _inverse(value: Any) -> _Statistic | None:
    """1/√v."""
    node, passed = _source(value)
    op = _op(node)
    if op == "rsqrt" or (op == "pow" and node.args[1] == -0.5):
        inner = _variance(node.args[0])
    elif op == "reciprocal" or (op == "pow" and node.args[1] == -1):
        inner = _root(node.args[0])
    elif op in _QUOTIENTS and node.args[0] == 1:
        inner = _root(node.args[1])
    else:
        return None
    return None if inner is None else inner.then(node, *passed)


def _root(value: Any) -> _Statistic | None:
    """√v: of a variance, a norm or a standard deviation, with what is added to it."""
    node, passed = _source(value)
    op = _op(node)
    if op == "sqrt" or (op == "pow" and node.args[1] == 0.5):
        inner = _variance(node.args[0])
    elif op in ("add", "clamp_min", "clamp", "maximum") and _small(node.args[1:2]):
        inner = _root(node.args[0])
        inner = None if inner is None else replace(inner, form="other" if op == "add" else "clamped")
    elif op in ("linalg_vector_norm", "norm", "std"):
        inner = _reduced(node, form="clamped" if op != "std" else "other", centred=op == "std")
    else:
        return None
    return None if inner is None else inner.then(node, *passed)


def _variance(value: Any) -> _Statistic | None:
    """V, with what is added to it: a mean or sum of squares."""
    node, passed = _source(value)
    op = _op(node)
    inner: _Statistic | None = None
    if op in ("add", "clamp_min", "clamp") and _small(node.args[1:2]):
        inner = _variance(node.args[0])
        if inner is not None:
            has_eps = inner.eps == 0 and op == "add" and inner.form != "other"
            inner = replace(inner, eps=float(node.args[1]), form=inner.form if has_eps else "other")  # type: ignore[arg-type]
    elif op == "var":
        inner = _reduced(node, form=_biased(node), centred=True)
    elif op in ("mean", "sum"):
        square, casts = _source(node.args[0])
        x = _squared(square)
        if x is not None:
            inner = _reduced(node, form="mean" if op == "mean" else "other")
            inner = None if inner is None else replace(inner.then(square, *casts), x=x)
    return None if inner is None else inner.then(node, *passed)


def _biased(node: torch.fx.Node) -> Form:
    a = bind(node.target, tuple(node.args), dict(node.kwargs))
    correction = getattr(a, "correction", 1.0 if getattr(a, "unbiased", True) else 0.0)
    return "mean" if correction == 0 else "other"


def _squared(node: torch.fx.Node) -> torch.fx.Node | None:
    """X of x²."""
    op = _op(node)
    if op == "square" or (op == "pow" and node.args[1] == 2) or (op in _PRODUCTS and node.args[0] is node.args[1]):
        return _source(node.args[0])[0]
    return None


def _reduced(node: torch.fx.Node, form: Form, centred: bool = False) -> _Statistic | None:
    """A reduction along axes that it keeps with size one; of a norm, the Euclidean one."""
    a = bind(node.target, tuple(node.args), dict(node.kwargs))
    axes = getattr(a, "dim", None)
    if not getattr(a, "keepdim", False) or not axes or getattr(a, "ord", getattr(a, "p", 2)) not in (2, None):
        return None
    x, _ = _source(node.args[0])
    axes = (axes,) if isinstance(axes, int) else tuple(axes)
    return _Statistic(x, axes, (), form=form, centred=centred)


def _centred(node: torch.fx.Node) -> tuple[torch.fx.Node, ...] | None:
    """X, and the calls that make its mean, for x − mean x."""
    if _op(node) != "sub" or not isinstance(node.args[1], torch.fx.Node):
        return None
    x, _ = _source(node.args[0])
    mean, passed = _source(node.args[1])
    if _op(mean) != "mean":
        return None
    other, _ = _source(mean.args[0])
    return (x, mean, *passed) if other is x else None


def _small(numbers: Any) -> bool:
    """Whether the constant is an ε: not negative, and far below the variance of a usual activation."""
    return bool(numbers) and isinstance(numbers[0], int | float) and 0 <= numbers[0] <= 1e-2


def norm_name(norm: WrittenNorm) -> str:
    """The module that writes it."""
    return module_of(norm.node) or norm.op
