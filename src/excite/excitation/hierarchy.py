"""A hierarchy of binary classifiers for m classes (section 7.1): m − 1 nodes in all, one output of the model each.

A balanced hierarchy takes ⌈log2 m⌉ decisions at most. (⌈log2 m⌉ classifiers *in all* would be a bit code, whose bits have
to be decided for classes they were not chosen for.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from excite._core.background import DeferredChecks
from excite._core.calls import Batch, batch_size, check_finite, repeated
from excite._core.checks import check_count, check_tensor, is_whole, shown
from excite.errors import InputError, ModelError
from excite.excitation.targets.binary import binary_errors, check_loss, check_threshold
from excite.excitation.targets.labels import class_labels
from excite.excitation.targets.target import Loss, Target

_MAX_CLASSES = 100_000  # classes
Groups = int | Sequence[Any]  # a class, or groups of groups


class Hierarchy:
    """A binary tree of decisions: its leaves are the classes 0 … m − 1, its nodes are numbered from the root.

    Args:
        groups: nested lists or tuples of class numbers, such as [[0, 1, 8, 9], [2, 3, 4, 5, 6, 7]]. A list of more than
            two groups is halved until pairs are left, in the order given.

    Attributes:
        classes: m.
        depth: decisions of the longest path.
        nodes: (classes to the left, classes to the right) of each node; output n of the model decides node n.

    Raises:
        InputError: if not every class from 0 on is there exactly once, or there are fewer than two.

    Example:
        >>> print(excite.Hierarchy([[0, 1], [2, 3]]))
        0: 0, 1 | 2, 3
        1: 0 | 1
        2: 2 | 3
    """

    def __init__(self, groups: Groups):
        self.nodes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self._children: list[list[int]] = []  # a node, or −1 − class
        self._paths: dict[int, list[tuple[int, int]]] = {}  # class -> (node, side) from the root
        groups = _plain(groups)
        leaves = sorted(_leaves(groups))
        self.classes = len(leaves)
        if self.classes < 2 or leaves != list(range(self.classes)):
            raise InputError(
                f"hierarchy: expected every class from 0 on exactly once, at least two; got {shown(groups)}"
            )
        self._grow(groups, [])
        self.depth = max(map(len, self._paths.values()))

    @classmethod
    def balanced(cls, classes: int) -> Hierarchy:
        """Halves of the classes in their order: ⌈log2 m⌉ decisions at most.

        Args:
            classes: number of classes, at least 2.

        Returns:
            The hierarchy.
        """
        return cls(list(range(check_count(classes, "classes", 2, _MAX_CLASSES))))

    @classmethod
    def by_means(cls, x: Tensor, y: Tensor, classes: int) -> Hierarchy:
        """Classes whose means are near stay together as long as ⌈log2 m⌉ decisions allow.

        Each group is ordered along the first principal axis of its class means and cut where the sum of squared distances
        to the means of the two parts is smallest.

        Args:
            x: training points (N, ...).
            y: their labels (N,).
            classes: number of classes, each with at least one point.

        Returns:
            The hierarchy.

        Raises:
            InputError: if a class has no point, or points and labels do not fit.
        """
        classes = check_count(classes, "classes", 2, _MAX_CLASSES)
        check_finite(check_tensor(x, "the points x", floating=False), "points")
        if not x.dim() or not x.numel():
            raise InputError(f"expected points of shape (N, ...), at least one; got {shown(x)}")
        labels = class_labels(y, len(x), classes)
        flat = x.detach().reshape(len(x), -1).double()
        absent = sorted(set(range(classes)) - set(labels.unique().tolist()))
        if absent:
            raise InputError(f"hierarchy: no sample of class {absent[0]} in the data: give samples of every class")
        return cls(_cut(torch.stack([flat[labels == c].mean(0) for c in range(classes)]), list(range(classes))))

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """The paths of all classes.

        Returns:
            Three tensors (m, depth): for each class and decision the node, the side taken (0 or 1), and 1 if the path is that
            long, else 0.
        """
        shape = self.classes, self.depth
        node, side, used = torch.zeros(shape, dtype=torch.long), torch.zeros(shape), torch.zeros(shape)
        for c, path in self._paths.items():
            for k, (n, s) in enumerate(path):
                node[c, k], side[c, k], used[c, k] = n, s, 1
        return node, side, used

    def descend(self, right: Tensor) -> Tensor:
        """Classes from the decisions of all nodes.

        Args:
            right: (B, m − 1) of bool, True to go right.

        Returns:
            Integer tensor (B,).

        Raises:
            InputError: if the decisions have another shape or type.
        """
        if (
            check_tensor(right, "decisions", floating=False).dim() != 2
            or right.shape[1] != self.classes - 1
            or right.dtype != torch.bool
        ):
            raise InputError(f"descend: expected decisions (B, {self.classes - 1}) of bool; got {shown(right)}")
        children = torch.tensor(self._children, device=right.device)  # (m − 1, 2)
        at = right.new_zeros(len(right), dtype=torch.long)
        for _ in range(self.depth):
            node = at.clamp(min=0)
            side = right.gather(1, node[:, None])[:, 0].long()
            at = torch.where(at < 0, at, children[node, side])
        return -1 - at

    def __repr__(self) -> str:
        return f"Hierarchy({self.classes} classes, depth {self.depth})"

    def __str__(self) -> str:
        return "\n".join(f"{n}: {_names(left)} | {_names(right)}" for n, (left, right) in enumerate(self.nodes))

    def _grow(self, groups: Groups, path: list[tuple[int, int]]) -> int:
        """Number the nodes below; returns the node, or −1 − class."""
        while not isinstance(groups, int) and len(groups) == 1:
            groups = groups[0]
        if isinstance(groups, int):
            self._paths[groups] = path
            return -1 - groups
        middle = (len(groups) + 1) // 2
        halves = groups[:middle], groups[middle:]
        number = len(self.nodes)
        self.nodes.append((tuple(_leaves(halves[0])), tuple(_leaves(halves[1]))))
        self._children.append([0, 0])
        for side, half in enumerate(halves):
            self._children[number][side] = self._grow(half, [*path, (number, side)])
        return number


class Nodes(Target):
    """Each node a binary classifier: output n should be 0 for classes to the left of node n and 1 for those to the right.

    The errors of a sample are the **sum** over the nodes on the path to its class; the other nodes are not asked. Excited,
    each of these nodes has extremes of its own: the searches for the nodes on a path are stacked in one batch, sample by
    decision. That is the binary method node by node, at `depth` times its cost, and not the m − 1 times that searching
    every node would take. Paths are filled up to `depth` with decisions of weight 0, so that shapes do not depend on labels.
    """

    def __init__(self, hierarchy: Hierarchy, threshold: float | None = None, loss: Loss = "squared"):
        self.hierarchy = hierarchy
        self.loss_name = check_loss(loss)
        self.threshold = check_threshold(threshold, self.loss_name)
        self._tables: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def outputs(self, returned: Tensor, batch: int) -> Tensor:
        """Returns the model's outputs as (B, m − 1), one column per node of the hierarchy."""
        nodes = self.hierarchy.classes - 1
        if nodes == 1 and returned.shape == (batch,):
            returned = returned[:, None]
        if returned.shape == (batch, nodes):
            return returned
        raise ModelError(
            f"a hierarchy of {nodes + 1} classes needs one output per node, (B, {nodes}); "
            f"the model returned {tuple(returned.shape)} for {batch} inputs: give it {nodes} outputs, or pick them with output="
        )

    def labels(self, y: object, batch: int, deferred: DeferredChecks | None = None) -> Tensor:
        """Returns the labels as class indices (B,)."""
        return class_labels(y, batch, self.hierarchy.classes, deferred)

    def errors(self, output: Tensor, labels: Tensor) -> Tensor:
        """Loss per sample, (B,): the sum over the nodes on the way to the sample's class."""
        node, side, used = self._paths_of(labels)
        return (binary_errors(output.gather(1, node), side, self.loss_name) * used.to(output.dtype)).sum(1)

    def decide(self, output: Tensor) -> Tensor:
        """Returns the class that each output leads to, (B,)."""
        return self.hierarchy.descend(output > self.threshold)

    def searches(self, x: Batch, labels: Tensor | None) -> tuple[Batch, Tensor | None]:
        """One search per node, over as many batches in a row: the nodes on the path of a label, or without labels all."""
        node = self._all_nodes(batch_size(x)) if labels is None else self._paths_of(labels)[0]  # (B, K)
        column = _column(node)
        direction = torch.zeros(len(column), self.hierarchy.classes - 1, device=node.device).scatter_(1, column, 1.0)
        return repeated(x, node.shape[1]), direction

    def losses(self, low: Tensor, high: Tensor, labels: Tensor) -> Tensor:
        """Excited loss per sample, (B,): half the sum of the errors at the lowest and the highest outputs on the way to its class."""
        node, side, used = self._paths_of(labels)  # (B, depth)
        low, high = _outputs_of(node, low), _outputs_of(node, high)
        errors = binary_errors(high, side, self.loss_name) + binary_errors(low, side, self.loss_name)
        return 0.5 * (errors * used.to(errors.dtype)).sum(1)

    def right(self, low: Tensor, high: Tensor, labels: Tensor) -> Tensor:
        """Whether every decision on the way to the sample's class is right in the middle of its two extremes, (B,)."""
        node, side, used = self._paths_of(labels)
        middle = (_outputs_of(node, low) + _outputs_of(node, high)) / 2
        return (((middle > self.threshold) == (side > 0)) | (used == 0)).all(1)

    def trivial(self, labels: Tensor) -> Tensor:
        """Returns the loss of the best constant outputs: of each node, by how often either side of it is taken."""
        node, side, used = self._paths_of(labels)
        flat, zeros = node.flatten(), torch.zeros(self.hierarchy.classes - 1, device=node.device)
        counts = zeros.scatter_add(0, flat, used.flatten())
        right = zeros.scatter_add(0, flat, (side * used).flatten()) / counts.clamp(min=1)
        if self.loss_name == "squared":
            return (counts * right * (1 - right)).sum() / len(labels)
        entropies: Tensor = torch.special.entr(right) + torch.special.entr(1 - right)
        return (counts * entropies).sum() / len(labels)

    def extremes(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Every node's own extremes, (B, m − 1): without labels there is no path, so all nodes are searched."""
        node = self._all_nodes(len(low) // (self.hierarchy.classes - 1))
        return _outputs_of(node, low), _outputs_of(node, high)

    def _all_nodes(self, batch: int) -> Tensor:
        return torch.arange(self.hierarchy.classes - 1).expand(batch, -1)

    def _paths_of(self, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if labels.device not in self._tables:
            node, side, used = (t.to(labels.device) for t in self.hierarchy.tables())
            self._tables[labels.device] = node, side, used
        node, side, used = self._tables[labels.device]
        return node[labels], side[labels], used[labels]

    def __repr__(self) -> str:
        return f"hierarchy={self.hierarchy!r}, threshold={self.threshold}, loss={self.loss_name!r}"


def _column(node: Tensor) -> Tensor:
    """Nodes (B, K) as (K·B, 1): search by search, as the repeated batches lie."""
    return node.T.reshape(-1, 1)


def _outputs_of(node: Tensor, outputs: Tensor) -> Tensor:
    """Output `node[i, k]` of sample i in search k, (B, K), from the outputs (K·B, m − 1) of all searches."""
    batch, count = node.shape
    return outputs.gather(1, _column(node).to(outputs.device)).reshape(count, batch).T


def choose_hierarchy(hierarchy: object, classes: int | None) -> Hierarchy:
    """A `Hierarchy` from itself, from nested groups, or "balanced" for `classes` classes."""
    if isinstance(hierarchy, str):
        if hierarchy != "balanced" or classes is None:
            raise InputError(
                f"hierarchy: expected 'balanced' together with classes=, nested groups or a Hierarchy; got {shown(hierarchy)}"
            )
        return Hierarchy.balanced(classes)
    if isinstance(hierarchy, list | tuple):
        hierarchy = Hierarchy(hierarchy)
    if not isinstance(hierarchy, Hierarchy):
        raise InputError(f"hierarchy: expected 'balanced', nested groups or a Hierarchy; got {shown(hierarchy)}")
    if classes is not None and classes != hierarchy.classes:
        raise InputError(f"the hierarchy has {hierarchy.classes} classes; classes={classes} does not match")
    return hierarchy


def _plain(groups: object, depth: int = 0) -> Groups:
    """Class numbers and nested lists of them, of Python's own types."""
    if is_whole(groups):
        return int(groups)
    if isinstance(groups, np.ndarray | Tensor) and groups.ndim:
        groups = groups.tolist()
    if not isinstance(groups, list | tuple) or not groups or depth > 100:
        raise InputError(f"hierarchy: expected class numbers and lists of them, none empty; got {shown(groups)}")
    return [_plain(group, depth + 1) for group in groups]


def _leaves(groups: Groups) -> Iterator[int]:
    if isinstance(groups, int):
        yield groups
    else:
        for group in groups:
            yield from _leaves(group)


def _names(group: tuple[int, ...]) -> str:
    return ", ".join(map(str, group))


def _cut(means: Tensor, group: list[int]) -> Groups:
    if len(group) == 1:
        return group[0]
    points = means[group]  # (n, features)
    centred = points - points.mean(0)
    axis = torch.linalg.svd(centred, full_matrices=False)[2][0]
    order = (centred @ axis).argsort(stable=True).tolist()
    # No part may need more decisions than are left: at most 2^(⌈log2 n⌉ − 1) classes in each.
    largest = 2 ** ((len(group) - 1).bit_length() - 1)
    places = range(len(group) - largest, largest + 1)

    def variation(position: int) -> float:
        sides = points[order[:position]], points[order[position:]]
        return sum(float((side - side.mean(0)).square().sum()) for side in sides)

    position = min(places, key=variation)
    return [_cut(means, [group[i] for i in side]) for side in (order[:position], order[position:])]
