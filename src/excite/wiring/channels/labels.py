"""Which numbers inside a model scale together: integer labels per element, joined by union-find.

A rescaling symmetry multiplies every activation by a positive factor that depends on its label only. Equal labels have
equal factors; what an operation demands of the factors becomes a union of labels, or pins a label to the factor one
(the label is *broken*, with the reason). What survives is a symmetry of the function.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

ZERO = 0  # the label of numbers that are always zero: they agree with every factor


@dataclass(frozen=True)
class Break:
    """Why a label is pinned: `what` happened; if `function`, it is the name of a function without homogeneity."""

    what: str
    function: bool = False


@dataclass
class State:
    """What is known about one class of labels."""

    broken: Break | None = None
    nonlinear: bool = False  # something other than a linear map acts on it, or a different one for every channel
    aside: bool = False  # ends in the output, or is no channel to begin with: not worth a group of its own
    norms: dict[str, None] = field(default_factory=dict)  # normalizations that read it, in order
    through: dict[str, None] = field(default_factory=dict)  # functions it passes, in order

    def absorb(self, other: State) -> None:
        self.broken = self.broken or other.broken
        self.nonlinear |= other.nonlinear
        self.aside |= other.aside
        self.norms |= other.norms
        self.through |= other.through


def compact(*labels: Tensor) -> tuple[Tensor, ...]:
    """The same tensors, with axes along which all of them repeat themselves (stride zero) reduced to one entry."""
    labels = torch.broadcast_tensors(*labels)
    for axis in range(labels[0].dim()):
        if labels[0].shape[axis] > 1 and all(one.stride(axis) == 0 for one in labels):
            labels = tuple(one.narrow(axis, 0, 1) for one in labels)
    return labels


class Classes:
    """Labels and their classes. Positive labels are channels; negative ones are things that never scale."""

    def __init__(self) -> None:
        self._parent: list[int] = [ZERO]
        self._states: dict[int, State] = {}
        self._sources: list[str] = []

    def fresh(self, count: int) -> Tensor:
        start = len(self._parent)
        self._parent.extend(range(start, start + count))
        return torch.arange(start, start + count)

    def source(self, name: str) -> int:
        """A negative label for what never scales: the model's input, a constant."""
        if name not in self._sources:
            self._sources.append(name)
        return -1 - self._sources.index(name)

    def find(self, label: int) -> int:
        if label < 0:
            return label
        root = label
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[label] != root:
            self._parent[label], label = root, self._parent[label]
        return root

    def state(self, label: int) -> State:
        return self._states.setdefault(self.find(label), State())

    def fixed(self, label: int) -> bool:
        """Whether the factor of this label is one whatever happens later."""
        if label <= 0:
            return label < 0
        state = self._states.get(self.find(label))
        return state is not None and state.broken is not None

    def distinct(self, labels: Tensor) -> list[int]:
        """The labels that occur, without zeros."""
        (labels,) = compact(labels)
        return [label for label in labels.unique().tolist() if label != ZERO]

    def channels(self, labels: Tensor) -> list[int]:
        """The positive labels that occur."""
        return [label for label in self.distinct(labels) if label > 0]

    def all_fixed(self, labels: Tensor) -> bool:
        return all(self.fixed(label) for label in self.distinct(labels))

    def pin(self, labels: Tensor | Iterable[int], reason: Break) -> None:
        """The factor of these labels must be one. The first reason stays."""
        for label in self.channels(labels) if isinstance(labels, Tensor) else labels:
            if label > 0:
                state = self.state(label)
                state.broken = state.broken or reason

    def set_aside(self, labels: Tensor, reason: Break) -> None:
        """Pin labels that nobody would look for among the groups, unless something else reads them."""
        for label in self.channels(labels):
            self.state(label).aside = True
        self.pin(labels, reason)

    def pass_through(self, labels: Tensor, name: str, *, linear: bool) -> None:
        for label in self.channels(labels):
            state = self.state(label)
            state.nonlinear |= not linear
            state.through.setdefault(name)

    def not_mixable(self, labels: Tensor) -> None:
        """Each of these channels goes through a map of its own: they scale, but cannot be mixed with each other."""
        for label in self.channels(labels):
            self.state(label).nonlinear = True

    def join(self, first: int, second: int, what: str) -> None:
        """The factors of two labels must be equal; `what` says why, should one of them be a thing that never scales."""
        a, b = self.find(first), self.find(second)
        if a == b or ZERO in (a, b):
            return
        if a < 0 or b < 0:
            if max(a, b) > 0:
                self.pin([max(a, b)], Break(what.format(self._sources[-1 - min(a, b)])))
            return
        a, b = min(a, b), max(a, b)
        self._parent[b] = a
        if b in self._states:
            self.state(a).absorb(self._states.pop(b))

    def unite(self, first: Tensor, second: Tensor, what: str) -> Tensor:
        """Join two label tensors entry by entry, with broadcasting; the labels of the result."""
        a, b = compact(first, second)
        pairs = torch.stack([a.reshape(-1), b.reshape(-1)]).unique(dim=1)
        for one, other in zip(*pairs.tolist()):
            self.join(one, other, what)
        first, second = torch.broadcast_tensors(first, second)
        a, b = compact(first, second)
        # A channel says more than a thing that never scales, and that more than zero.
        take_second = (a == ZERO) | ((a < 0) & (b > 0))
        return torch.where(take_second, b, a).expand(first.shape) if bool(take_second.any()) else first

    def reduce(self, labels: Tensor, axes: Iterable[int], what: str) -> Tensor:
        """Join all labels along `axes`; the result keeps them with size one."""
        for axis in sorted({axis % labels.dim() for axis in axes}) if labels.dim() else ():
            result = labels.narrow(axis, 0, 1)
            if labels.shape[axis] > 1 and labels.stride(axis) != 0:
                differs = labels != result
                if bool(differs.any()):
                    result = self._reduce_axis(labels, axis, what)
            labels = result
        return labels

    def _reduce_axis(self, labels: Tensor, axis: int, what: str) -> Tensor:
        columns = labels.movedim(axis, 0).reshape(labels.shape[axis], -1).unique(dim=1)
        for column in columns.T.tolist():
            present = sorted(set(column) - {ZERO}, reverse=True)
            for other in present[1:]:
                self.join(present[0], other, what)
        # The largest label along the axis: a channel before a thing that never scales; zeros (padding) only if alone.
        lowest = torch.iinfo(labels.dtype).min
        result = labels.masked_fill(labels == ZERO, lowest).amax(axis, keepdim=True)
        return result.masked_fill(result == lowest, ZERO)


class Mirrors:
    """Pairs of labels whose factors are the inverse of each other, as the channels of queries and keys in attention."""

    def __init__(self, classes: Classes):
        self._classes = classes
        self._pairs: set[tuple[int, int]] = set()

    def add(self, first: Tensor, second: Tensor) -> None:
        a, b = compact(first, second)
        pairs = torch.stack([a.reshape(-1), b.reshape(-1)]).unique(dim=1)
        self._pairs.update((one, other) for one, other in zip(*pairs.tolist()) if ZERO not in (one, other))

    def settle(self, reason: Break) -> None:
        """Draw all conclusions: two mirrors of one label are equal, its own mirror has factor one."""
        find, fixed = self._classes.find, self._classes.fixed
        changed = True
        while changed:
            changed = False
            seen: dict[int, int] = {}
            for pair in self._pairs:
                for one, other in (pair, pair[::-1]):
                    known = seen.setdefault(find(one), other)
                    if find(known) != find(other) and max(known, other) > 0:
                        if min(known, other) > 0:
                            self._classes.join(known, other, "")
                        else:
                            self._classes.pin([known, other], reason)
                        changed |= min(known, other) > 0
                if (find(pair[0]) == find(pair[1]) or fixed(pair[0]) or fixed(pair[1])) and not (
                    fixed(pair[0]) and fixed(pair[1])
                ):
                    self._classes.pin(pair, reason)
                    changed = True

    def of_roots(self) -> dict[int, int]:
        """Root to root, for the classes that are free to scale."""
        found: dict[int, int] = {}
        for pair in self._pairs:
            a, b = map(self._classes.find, pair)
            if a > 0 and b > 0 and not self._classes.fixed(a):
                found[a], found[b] = b, a
        return found
