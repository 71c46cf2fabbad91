"""One row of the operator table, and the table itself.

A column that is missing (None) makes whoever needs it refuse the operator by name: nothing is assumed about an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from excite.wiring.channels.signals import ChannelContext
    from excite.wiring.propagation.counts import PathContext, ScaledCounts
    from excite.wiring.propagation.sensitivity import LipschitzContext

Conservation = Literal["matrix", "channel", "norm", "none"]
Linearity = Literal["constant", "linear", "piecewise", "discrete", "smooth"]
Pattern = Callable[[SimpleNamespace, Any], Iterable[Tensor | None]]
Refusal = Callable[[SimpleNamespace], str | None]
# Rules get the state of the analysis, the node of the graph, and the call's arguments by the names of the ATen schema.
ChannelRule = Callable[["ChannelContext", torch.fx.Node, SimpleNamespace], Any]
LipschitzRule = Callable[["LipschitzContext", torch.fx.Node, SimpleNamespace], Any]
PathRule = Callable[["PathContext", torch.fx.Node, SimpleNamespace], "ScaledCounts | tuple[ScaledCounts, ...] | None"]


@dataclass(frozen=True)
class Pieces:
    """How an operator depends on its floating-point arguments.

    - "constant": not at all, as `zeros_like`.
    - "linear": it is affine in all of them together, as `add` and `cat`.
    - "piecewise": affine as long as `pattern(arguments, result)`, tensors of booleans or integers, stays the same. Arguments
      with the same pattern form a convex set.
    - "discrete": its result is constant on convex sets and is its own pattern, as `gt` and `floor`.
    - "smooth": none of these.

    Args:
        linearity: One of the five words above.
        pattern: Required for "piecewise".
        factors: Groups of arguments that are multiplied with each other: at most one group may depend on the input.
        fixed: Arguments that must not depend on the input.
        unless: Returns why the entry does not hold for these arguments, as a phrase after the operator's name; else None.
    """

    linearity: Linearity
    pattern: Pattern | None = None
    factors: tuple[tuple[str, ...], ...] = ()
    fixed: tuple[str, ...] = ()
    unless: Refusal | None = None


@dataclass(frozen=True)
class ActivationKinks:
    """Where an elementwise activation bends.

    Args:
        kinks: Returns the kinks from the call's arguments after the first; entries that are None are skipped.
        lower: Whether a unit is active above the first kink; otherwise it is active above 0.
        smooth: Whether the activation has no linear pieces; `kinks` then holds the 0 above which a unit counts as active.
    """

    kinks: Callable[..., tuple[Any, ...]]
    lower: bool = True
    smooth: bool = False


@dataclass(frozen=True)
class OperatorRow:
    """Everything that Excite knows about one ATen operator, in the overloads of `OVERLOADS`; `name` covers the in-place `name_` too.

    Rules read the arguments by the names of the schema, so that one row serves overloads that differ in the types of their
    arguments.

    Args:
        name: ATen name without namespace and overload.
        channels: Propagates channel labels (`excite.trace`).
        conservation: The strongest conservation law that survives the operator: "matrix" for linear maps that are the same
            for all channels, "channel" for positively homogeneous functions, "norm" for normalizations, "none" for
            functions that are not positively homogeneous. None: not known.
        lipschitz: Propagates how far a tensor can move (`excite.lipschitz.bound`).
        pieces: Whether it is piecewise linear (`excite.lipschitz.along`, `region_map`).
        paths: Propagates the number of paths (`excite.wiring.path_count`).
        activation: Where it bends, if it is an activation.
    """

    name: str
    channels: ChannelRule | None = None
    conservation: Conservation | None = None
    lipschitz: LipschitzRule | None = None
    pieces: Pieces | None = None
    paths: PathRule | None = None
    activation: ActivationKinks | None = None


OPERATORS: dict[str, OperatorRow] = {}

# The overloads that the rules were written for: variants of one function that take other types (`add.Tensor`, `add.Scalar`) or
# other axes (`sum.dim_IntList`). Any other one, such as `scatter.reduce`, which multiplies, is refused by name.
OVERLOADS = frozenset({
    "default", "Tensor", "Scalar", "Tensor_Scalar", "Tensor_Tensor", "Scalar_Tensor", "Scalar_Other", "Scalar_Self",
    "Tensor_mode", "Scalar_mode", "self", "ScalarOther", "ScalarSelf", "other", "decimals", "input", "using_ints",
    "dim", "dims", "dim_int", "dim_IntList", "int", "intlist", "sizes", "sections", "indices", "tensor_indices_or_sections",
    "self_Tensor", "self_int", "correction", "ScalarOpt_dim", "ScalarOpt_dim_dtype", "ScalarOpt_dtype", "stable",
    "int_Tensor", "int_Scalar", "Tensor_hacked_twin", "hacked_twin", "src", "value",
    "vec", "padding", "sublist", "no_stats", "generator", "dtype", "dtype_layout", "device", "prim_Device", "prim_dtype", "prim_other",
})  # fmt: skip


def add_row(names: str, **columns: Any) -> None:
    """Adds a row with these columns for each of the operators, which are separated by spaces.

    Raises:
        ValueError: If an operator has a row already.
    """
    for name in names.split():
        if name in OPERATORS:
            raise ValueError(f"two rows for {name}")
        OPERATORS[name] = OperatorRow(name, **columns)


CONSTANT, LINEAR, DISCRETE, SMOOTH = Pieces("constant"), Pieces("linear"), Pieces("discrete"), Pieces("smooth")


def product_of(*factors: str, fixed: tuple[str, ...] = (), unless: Refusal | None = None) -> Pieces:
    """Linear in each of the factors; several arguments in one factor are separated by a slash."""
    return Pieces("linear", factors=tuple(tuple(factor.split("/")) for factor in factors), fixed=fixed, unless=unless)


def piecewise(pattern: Pattern, fixed: tuple[str, ...] = (), unless: Refusal | None = None) -> Pieces:
    """Affine as long as the pattern stays the same."""
    return Pieces("piecewise", pattern, fixed=fixed, unless=unless)
