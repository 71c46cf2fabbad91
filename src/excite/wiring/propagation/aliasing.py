"""Operators that write into a tensor of which another node holds a view."""

from __future__ import annotations

import operator

import torch

from excite.wiring.operators.movement import REPEATS, SAME, VIEWS
from excite.wiring.propagation.schema import is_inplace, name_of

_VIEWS = frozenset((*VIEWS, *REPEATS, *SAME, "detach"))


class Aliases:
    """Visits the nodes of a graph in order.

    The graph gives the result of `x.relu_()` a name that later consumers of x use; but consumers of another view of x do
    not. An interpreter has to treat such views as unknown.
    """

    def __init__(self) -> None:
        self._base: dict[torch.fx.Node, torch.fx.Node] = {}
        self._visited: set[torch.fx.Node] = set()

    def overwritten(self, node: torch.fx.Node) -> list[torch.fx.Node]:
        """The nodes that share memory with what `node` writes into, and are read later under their old name."""
        self._visited.add(node)
        first = node.args[0] if node.args else None
        if not isinstance(first, torch.fx.Node):
            return []
        base = self._base.get(first, first)
        if node.target is operator.getitem or name_of(node.target) in _VIEWS:
            self._base[node] = base
        if not is_inplace(node.target):
            return []
        self._base[node] = base
        shared = [other for other, root in self._base.items() if root is base and other is not node] + [base]
        return [other for other in shared if any(user not in self._visited for user in other.users)]
