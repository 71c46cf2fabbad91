"""Which numbers inside a model scale together: integer labels per element, joined by union-find.

A rescaling symmetry multiplies every activation by a positive factor that depends on its label only. Equal labels have
equal factors; what an operation demands of the factors becomes a union of labels, or pins a label to the factor one
(the label is *pinned*, with the reason). What survives is a symmetry of the function.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

ZERO = 0  # the label of numbers that are always zero: they agree with every factor


@dataclass(frozen=True)
class Break:
    """Why a label is pinned: `cause` happened.

    If `function`, it is the name of a function without homogeneity, or of one that is not `listed` in the operator table.
    """

    cause: str
    function: bool = False
    listed: bool = True


@dataclass
class State:
    """Properties of one class of labels."""

    pinned_by: Break | None = None
    nonlinear: bool = False  # something other than a linear map acts on it, or a different one for every channel
    excluded: bool = False  # ends in the output, or is no channel to begin with: not worth a group of its own
    norms: dict[str, None] = field(default_factory=dict)  # normalizations that read it, in order
    through: dict[str, None] = field(default_factory=dict)  # functions it passes, in order

    def absorb(self, other: State) -> None:
        """Adds what is known about another class that was joined with this one."""
        self.pinned_by = self.pinned_by or other.pinned_by
        self.nonlinear |= other.nonlinear
        self.excluded |= other.excluded
        self.norms |= other.norms
        self.through |= other.through


def compact(*labels: Tensor) -> tuple[Tensor, ...]:
    """The same tensors, with axes along which all of them repeat themselves (stride zero) reduced to one entry."""
    labels = torch.broadcast_tensors(*labels)
    for axis in range(labels[0].dim()):
        if labels[0].shape[axis] > 1 and all(label.stride(axis) == 0 for label in labels):
            labels = tuple(label.narrow(axis, 0, 1) for label in labels)
    return labels


class Classes:
    """Labels and their classes. Positive labels are channels; negative ones are things that never scale."""

    def __init__(self) -> None:
        self._parent: list[int] = [ZERO]
        self._states: dict[int, State] = {}
        self._sources: list[str] = []

    def fresh(self, count: int) -> Tensor:
        """New labels, each a class of its own."""
        start = len(self._parent)
        self._parent.extend(range(start, start + count))
        return torch.arange(start, start + count)

    @property
    def last(self) -> int:
        """The largest label so far."""
        return len(self._parent) - 1

    def source(self, name: str) -> int:
        """A negative label for what never scales: the model's input, a constant."""
        if name not in self._sources:
            self._sources.append(name)
        return -1 - self._sources.index(name)

    def find(self, label: int) -> int:
        """The root that stands for the class of a label."""
        if label < 0:
            return label
        parent, root = self._parent, label
        while parent[root] != root:
            root = parent[root]
        while parent[label] != root:
            parent[label], label = root, parent[label]
        return root

    def state(self, label: int) -> State:
        """Properties of the class of a label."""
        root = self.find(label)
        state = self._states.get(root)
        if state is None:
            state = self._states[root] = State()
        return state

    def fixed(self, label: int) -> bool:
        """Whether the factor of this label is one whatever happens later."""
        if label <= 0:
            return label < 0
        state = self._states.get(self.find(label))
        return state is not None and state.pinned_by is not None

    def distinct(self, labels: Tensor) -> list[int]:
        """The labels that occur, without zeros."""
        (labels,) = compact(labels)
        return [label for label in labels.unique().tolist() if label != ZERO]

    def channels(self, labels: Tensor) -> list[int]:
        """The positive labels that occur."""
        return [label for label in self.distinct(labels) if label > 0]

    def all_fixed(self, labels: Tensor) -> bool:
        """Whether none of these labels can scale."""
        return all(self.fixed(label) for label in self.distinct(labels))

    def pin(self, labels: Tensor | Iterable[int], reason: Break) -> None:
        """The factor of these labels must be one. The first reason stays."""
        for label in self.channels(labels) if isinstance(labels, Tensor) else labels:
            if label > 0:
                state = self.state(label)
                state.pinned_by = state.pinned_by or reason

    def exclude(self, labels: Tensor, reason: Break) -> None:
        """Pins labels that are not expected among the groups, unless something else reads them."""
        for label in self.channels(labels):
            self.state(label).excluded = True
        self.pin(labels, reason)

    def pass_through(self, labels: Tensor, name: str, *, linear: bool) -> None:
        """Records a function that these channels pass, and whether it is linear."""
        for label in self.channels(labels):
            state = self.state(label)
            state.nonlinear |= not linear
            state.through.setdefault(name)

    def not_mixable(self, labels: Tensor) -> None:
        """Each of these channels goes through a map of its own: they scale, but cannot be mixed with each other."""
        for label in self.channels(labels):
            self.state(label).nonlinear = True

    def join(self, first: int, second: int, cause: str) -> None:
        """The factors of two labels must be equal; `cause` says why, should one of them be a thing that never scales."""
        a, b = self.find(first), self.find(second)
        if a == b or ZERO in (a, b):
            return
        if a < 0 or b < 0:
            if max(a, b) > 0:
                self.pin([max(a, b)], Break(cause.format(self._sources[-1 - min(a, b)])))
            return
        a, b = min(a, b), max(a, b)
        self._parent[b] = a
        if b in self._states:
            self.state(a).absorb(self._states.pop(b))

    def unite(self, first: Tensor, second: Tensor, cause: str) -> Tensor:
        """Join two label tensors entry by entry, with broadcasting; the labels of the result."""
        a, b = compact(first, second)
        pairs = torch.stack([a.reshape(-1), b.reshape(-1)]).unique(dim=1)
        for item, other in zip(*pairs.tolist()):
            self.join(item, other, cause)
        first, second = torch.broadcast_tensors(first, second)
        a, b = compact(first, second)
        # A channel says more than a thing that never scales, and that more than zero.
        take_second = (a == ZERO) | ((a < 0) & (b > 0))
        return torch.where(take_second, b, a).expand(first.shape) if bool(take_second.any()) else first

    def reduce(self, labels: Tensor, axes: Iterable[int], cause: str) -> Tensor:
        """Join all labels along `axes`; the result keeps them with size one."""
        for axis in sorted({axis % labels.dim() for axis in axes}) if labels.dim() else ():
            result = labels.narrow(axis, 0, 1)
            if labels.shape[axis] > 1 and labels.stride(axis) != 0:
                differs = labels != result
                if bool(differs.any()):
                    result = self._reduce_axis(labels, axis, cause)
            labels = result
        return labels

    def _reduce_axis(self, labels: Tensor, axis: int, cause: str) -> Tensor:
        columns = labels.movedim(axis, 0).reshape(labels.shape[axis], -1).unique(dim=1)
        for column in columns.T.tolist():
            present = sorted(set(column) - {ZERO}, reverse=True)
            for other in present[1:]:
                self.join(present[0], other, cause)
        # The largest label along the axis: a channel before a thing that never scales; zeros (padding) only if alone.
        lowest = torch.iinfo(labels.dtype).min
        result = labels.masked_fill(labels == ZERO, lowest).amax(axis, keepdim=True)
        return result.masked_fill(result == lowest, ZERO)


class Relations:
    """Relations between the factors of labels beyond equality: products of powers that are one.

    In logarithms a relation is linear, Σ n · log factor(label) = 0: the product c of two activations a and b has c = a + b, the
    channels of queries and keys in attention have q + k = 0. The solutions are spanned by `directions`, each of which is a
    rescaling symmetry of its own.
    """

    def __init__(self, classes: Classes):
        self._classes = classes
        self._rows: list[tuple[dict[int, int], Break]] = []
        self._made: set[int] = set()  # labels of products: they follow from their factors
        self._products: dict[tuple[int, ...], int] = {}
        self._solved: dict[int, dict[int, Fraction]] = {}  # root: what its logarithm is, by the roots that are free

    def invert(self, first: Tensor, second: Tensor, reason: Break) -> None:
        """The factors of two label tensors are the inverse of each other, entry by entry."""
        for left, other in _pairs(first, second):
            if ZERO not in (left, other):
                self._rows.append((_counted(left, other), reason))

    def product(self, factors: Sequence[Tensor], reason: Break) -> Tensor:
        """New labels for a product of activations, entry by entry; a factor may occur several times."""
        factors = torch.broadcast_tensors(*factors)
        shape = factors[0].shape
        columns = torch.stack([factor.reshape(-1) for factor in compact(*factors)])
        distinct, inverse = columns.unique(dim=1, return_inverse=True)
        labels = []
        for column in distinct.T.tolist():
            key = tuple(sorted(column))
            if ZERO in key:
                labels.append(ZERO)
                continue
            if key not in self._products:
                (label,) = self._classes.fresh(1).tolist()
                self._products[key] = label
                self._made.add(label)
                row = _counted(*key)
                row[label] = -1
                self._rows.append((row, reason))
            labels.append(self._products[key])
        return torch.tensor(labels)[inverse].view(compact(*factors)[0].shape).expand(shape)

    def solve(self) -> None:
        """Solve for the labels as they are joined and pinned by now; what has no solution but one is pinned."""
        classes = self._classes
        made = {classes.find(label) for label in self._made}
        used: dict[int, set[int]] = {}  # free root: solved ones that depend on it
        reasons: dict[int, Break] = {}
        for labels, reason in self._rows:
            # What keeps a product from scaling is what keeps its factors from it.
            reasons_of_factors = (
                classes.state(label).pinned_by for label in labels if label > 0 and classes.fixed(label)
            )
            reason = next((reason for reason in reasons_of_factors if reason is not None), reason)
            row: dict[int, Fraction] = {}
            for label, count in labels.items():
                if classes.fixed(label):
                    continue
                root = classes.find(label)
                reasons.setdefault(root, reason)
                for free, coefficient in self._solved.get(root, {root: Fraction(1)}).items():
                    row[free] = row.get(free, Fraction(0)) + count * coefficient
            row = {root: coefficient for root, coefficient in row.items() if coefficient}
            if not row:
                continue
            pivot = max(row, key=lambda root: (root in made, root))
            value = row.pop(pivot)
            solution = {root: -coefficient / value for root, coefficient in row.items()}
            self._solved[pivot] = solution
            for other in used.pop(pivot, set()):
                coefficient = self._solved[other].pop(pivot)
                for root, weight in solution.items():
                    total = self._solved[other].get(root, Fraction(0)) + coefficient * weight
                    self._solved[other][root] = total
                    if not total:
                        del self._solved[other][root]
                    used.setdefault(root, set()).add(other) if total else used.get(root, set()).discard(other)
            for root in solution:
                used.setdefault(root, set()).add(pivot)
        for root, solution in self._solved.items():
            if not solution:
                classes.pin([root], reasons[root])

    def factors(self) -> dict[int, list[int]]:
        """By root of a product, in order: the roots of its factors."""
        by_root: dict[int, list[int]] = {}
        for key, label in self._products.items():
            by_root.setdefault(self._classes.find(label), []).extend(self._classes.find(factor) for factor in key)
        return dict(sorted(by_root.items()))

    def directions(self) -> list[dict[int, int]]:
        """By free root that others depend on: the exponents with which it and they scale, as whole numbers."""
        by_root: dict[int, dict[int, Fraction]] = {}
        for root, solution in self._solved.items():
            for free, coefficient in solution.items():
                by_root.setdefault(free, {free: Fraction(1)})[root] = coefficient
        result = []
        for free in sorted(by_root):
            denominator = math.lcm(*(coefficient.denominator for coefficient in by_root[free].values()))
            result.append({root: int(coefficient * denominator) for root, coefficient in sorted(by_root[free].items())})
        return result


def _pairs(first: Tensor, second: Tensor) -> list[tuple[int, int]]:
    a, b = compact(first, second)
    return list(zip(*torch.stack([a.reshape(-1), b.reshape(-1)]).unique(dim=1).tolist()))


def _counted(*labels: int) -> dict[int, int]:
    row: dict[int, int] = {}
    for label in labels:
        row[label] = row.get(label, 0) + 1
    return row
