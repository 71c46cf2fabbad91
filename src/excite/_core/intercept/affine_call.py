"""One affine call: its arguments, the call with another input, and its sum in the letters of einsum.

The second part of the file is the table of functions that multiply and sum: where their factors stand, and which axes they
sum over.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

At = tuple[int | str, ...]  # where an argument stands: (1,), ("other",), or in a list, (1, 0)
Terms = tuple[list[str], str]  # letters of the factors, letters of the result
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Product:
    """How a function of torch multiplies.

    `factors(args, kwargs)` says where the factors stand, None if the call is none that is known; `terms` which axes are summed; `added`
    where a tensor stands that is added.
    """

    factors: Callable[[tuple[Any, ...], dict[str, Any]], list[At] | None]
    terms: Callable[[list[Tensor], tuple[Any, ...], dict[str, Any]], Terms | None]
    added: Callable[[tuple[Any, ...], dict[str, Any]], At | None] = lambda args, kwargs: None


_PLACES: tuple[At, ...] = ((0,), (1,), (2,), (3,))


def find(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, *names: str) -> At | None:
    """Where a tensor stands that may come by position or by name."""
    if position < len(args):
        return _PLACES[position] if isinstance(args[position], Tensor) else None
    for name in names:
        if isinstance(kwargs.get(name), Tensor):
            return (name,)
    return None


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], at: At) -> Any:
    """The argument at a place: a position or a keyword, or an element of it."""
    value = args[at[0]] if isinstance(at[0], int) else kwargs[at[0]]
    return value if len(at) == 1 else value[at[1]]


def replaced(args: tuple[Any, ...], kwargs: dict[str, Any], changes: dict[At, Any]) -> Arguments:
    """The arguments with others in some places."""
    positional, named = list(args), dict(kwargs)
    for at, value in changes.items():
        key = at[0]
        values: Any = positional if isinstance(key, int) else named
        if len(at) == 1:
            values[key] = value
        else:  # in a list
            values[key] = [value if i == at[1] else other for i, other in enumerate(values[key])]
    return tuple(positional), named


@dataclass(frozen=True)
class InputStep:
    """One function that is applied to a signal on its way into an affine call."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    at: At

    def __call__(self, signal: Tensor) -> Tensor:
        args, kwargs = replaced(self.args, self.kwargs, {self.at: signal})
        return self.function(*args, **kwargs)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class AffineCall:
    """One affine call: which weight, where the input stands, and the arguments as they came.

    `before` is what copies the signal into the input of `function` and belongs to the call: the padding of a convolution,
    the unfolding of an image into patches. `input` is the signal in front of it; `entering(signal)` what comes of it.
    """

    name: str
    kind: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    input_at: At
    weight_at: At
    bias_at: At | None
    input: Tensor = field(repr=False, compare=False)
    fixed: tuple[At, ...] = ()  # tensors among the arguments that do not depend on the data
    product: Product | None = field(default=None, repr=False, compare=False)
    before: tuple[InputStep, ...] = ()

    def _argument(self, at: At) -> Tensor:
        return argument(self.args, self.kwargs, at)  # type: ignore[no-any-return]

    @property
    def weight(self) -> Tensor:
        return self._argument(self.weight_at)

    @property
    def bias(self) -> Tensor | None:
        return None if self.bias_at is None else self._argument(self.bias_at)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """All factors but the input; several in an einsum of three operands."""
        return tuple(self._argument(at) for at in self.fixed if at != self.bias_at) or (self.weight,)

    def entering(self, signal: Tensor) -> Tensor:
        """The argument of `function` for a signal of the shape of `input`: padded, unfolded."""
        if self.before and signal is self.input:
            return self._argument(self.input_at)
        for step in self.before:
            signal = step(signal)
        return signal

    def run(
        self, input: Tensor, *, frozen: bool = False, bias: bool = True, dtype: torch.dtype | None = None
    ) -> Tensor:
        """The call with another input; without its bias or whatever else is added, if `bias` is False.

        `frozen` detaches what does not depend on the data (weight and bias), so that no graph is kept for it; `dtype`
        computes in another precision.
        """
        changes = self._changes(frozen, bias, dtype)
        changes[self.input_at] = self.entering(input) if self.before else input
        args, kwargs = replaced(self.args, self.kwargs, changes)
        return self.function(*args, **kwargs)  # type: ignore[no-any-return]

    def linear_part(self, dtype: torch.dtype) -> AffineCall:
        """The call without its bias or whatever else is added, in another precision, with detached weights."""
        args, kwargs = replaced(self.args, self.kwargs, self._changes(False, False, dtype))
        return replace(self, args=args, kwargs=kwargs)

    def _changes(self, frozen: bool, bias: bool, dtype: torch.dtype | None) -> dict[At, Tensor]:
        """The arguments that `run` replaces, besides the input."""
        changes: dict[At, Tensor] = {}
        if frozen:
            for at in self.fixed:
                changes[at] = self._argument(at).detach()
        if dtype is not None:
            changes.update((at, self._argument(at).detach().to(dtype)) for at in self._places())
        added = self.bias_at
        if self.product is not None and self.function is not F.bilinear:
            added = self.product.added(self.args, self.kwargs)
        if not bias and added is not None:
            zeros = torch.zeros_like(changes.get(added, self._argument(added)))
            # What addmm adds may have a row for every sample, of which the other input has another number.
            changes[added] = zeros if self.product is None else zeros[(slice(1),) * zeros.dim()]
        return changes

    def _places(self) -> list[At]:
        """Where tensors stand, the input apart."""
        places: list[At] = []
        arguments: list[tuple[int | str, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        for key, value in arguments:
            if isinstance(value, list | tuple):
                places += [(key, i) for i, item in enumerate(value) if isinstance(item, Tensor)]
            elif isinstance(value, Tensor):
                places.append((key,))
        return [at for at in places if at != self.input_at]

    def without_input(self, *, detached: bool) -> AffineCall:
        """The call with an empty tensor for its input: nothing of the batch is kept."""
        empty = self._argument(self.input_at).detach().new_empty(0)
        changes = {at: self._argument(at).detach() for at in self._places()} if detached else {}
        args, kwargs = replaced(self.args, self.kwargs, {**changes, self.input_at: empty})
        return replace(self, args=args, kwargs=kwargs, input=empty)

    def terms(self, entering: Tensor | None = None) -> tuple[str, tuple[str, ...], str] | None:
        """The sum in the letters of einsum: of what enters `function`, of the other factors, of the result.

        None for convolutions and where it cannot be written that way.
        """
        entering = self._argument(self.input_at) if entering is None else entering
        if self.function is F.linear:
            terms = linear_terms(entering, self.weight)
            return None if terms is None else (terms[0][0], (terms[0][1],), terms[1])
        places = None if self.product is None else self.product.factors(self.args, self.kwargs)
        if self.product is None or places is None:
            return None
        factors = [entering if at == self.input_at else self._argument(at) for at in places]
        terms = self.product.terms(factors, self.args, self.kwargs)
        if terms is None:
            return None
        position = places.index(self.input_at)
        return terms[0][position], tuple(term for i, term in enumerate(terms[0]) if i != position), terms[1]

    def matrix(self, axes: int) -> Tensor | None:
        """The weight as (out, in), if the call is x ↦ x W' + b on the last of the `axes` of x; None otherwise."""
        if self.before or self.weight.dim() != 2 or any(self.kwargs.get(k, 1) != 1 for k in ("alpha", "beta")):
            return None
        terms = self.terms(self.weight.new_empty(()).expand((1,) * axes)) if axes else None
        if terms is None:
            return None
        of_input, of_weights, result = terms
        summed = of_input[-1]
        if len(of_weights) != 1 or len(of_weights[0]) != 2 or summed not in of_weights[0]:
            return None
        made = of_weights[0].replace(summed, "")
        if made in of_input or result != of_input[:-1] + made:
            return None
        return self.weight if of_weights[0][1] == summed else self.weight.T


def _letters(count: int, but: str = "") -> str:
    return "".join(letter for letter in string.ascii_uppercase if letter not in but)[:count]


def _matmul(x: int, y: int) -> Terms:
    batch = _letters(max(x, y, 2) - 2)
    first = batch[len(batch) - max(0, x - 2) :] + ("mk" if x > 1 else "k")
    second = batch[len(batch) - max(0, y - 2) :] + ("kn" if y > 1 else "k")
    return [first, second], batch + "m" * (x > 1) + "n" * (y > 1)


def _inner(x: int, y: int) -> Terms:
    letters = _letters(x + y - 2)
    return [letters[: x - 1] + "k", letters[x - 1 :] + "k"], letters


def _tensordot(factors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Terms | None:
    dims = args[2] if len(args) > 2 else kwargs.get("dims", 2)
    x, y = (factor.dim() for factor in factors)
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    if isinstance(dims, int):
        dims = list(range(x - dims, x)), list(range(dims))
    first, second = ([side] if isinstance(side, int) else list(side) for side in dims)
    letters = _letters(x + y)
    x_letters, w_letters = list(letters[:x]), list(letters[x:])
    for i, j in zip(first, second):
        w_letters[j] = x_letters[i]
    summed = set(x_letters) & set(w_letters)
    return ["".join(x_letters), "".join(w_letters)], "".join(k for k in x_letters + w_letters if k not in summed)


def _vecdot(factors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Terms:
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    return weighted_terms(factors, [dim])


def weighted_terms(factors: list[Tensor], dims: Sequence[int]) -> Terms:
    """(x · w).sum(dims): axes are aligned from the last; an axis of size one that is broadcast has a letter of its own."""
    size = max(factor.dim() for factor in factors)
    letters, spare = string.ascii_uppercase[:size], iter(string.ascii_lowercase)
    full = torch.broadcast_shapes(*(factor.shape for factor in factors))
    terms = []
    for factor in factors:
        own = letters[size - factor.dim() :]
        terms.append("".join(k if n == m else next(spare) for k, n, m in zip(own, factor.shape, full[-factor.dim() :])))
    summed = {letters[dim] for dim in dims}
    return terms, "".join(k for k in letters if k not in summed)


def _einsum_factors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[At] | None:
    if kwargs or not args:
        return None
    if isinstance(args[0], Tensor):  # einsum(x, [0, 1], y, [1, 2], [0, 2])
        places: list[At] = [(i,) for i in range(0, len(args) - 1, 2)]
    elif len(args) == 2 and isinstance(args[1], list | tuple):
        places = [(1, i) for i in range(len(args[1]))]
    else:
        places = [(i,) for i in range(1, len(args))]
    return places if all(isinstance(argument(args, kwargs, at), Tensor) for at in places) else None


def _einsum(factors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Terms | None:
    result: str | None
    if isinstance(args[0], Tensor):
        rows = [*args[1::2], *([args[-1]] if len(args) % 2 else [])]
        if any(letter is Ellipsis for row in rows for letter in row):
            return None
        named = ["".join(string.ascii_letters[i] for i in row) for row in rows]
        terms, result = named[: len(factors)], named[-1] if len(args) % 2 else None
    else:
        left, arrow, right = args[0].replace(" ", "").partition("->")
        terms, result = left.split(","), right if arrow else None
    if len(terms) != len(factors):
        return None
    extra_axes = [factor.dim() - len(term.replace("...", "")) for term, factor in zip(terms, factors)]
    spare = _letters(max(extra_axes), "".join(terms))
    terms = [term.replace("...", spare[len(spare) - n :]) for term, n in zip(terms, extra_axes)]
    if result is None:
        every = "".join(terms)
        result = "..." + "".join(sorted(k for k in set(every) if every.count(k) == 1 and k not in spare))
    result = result.replace("...", spare)
    return None if any(len(set(term)) < len(term) for term in terms) else (terms, result)


def _multi_dot_factors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[At] | None:
    key: int | str = 0 if args else "tensors"
    rows = args[0] if args else kwargs.get("tensors")
    if isinstance(rows, Tensor):  # chain_matmul(x, y, …)
        return [(i,) for i in range(len(args))] if all(isinstance(a, Tensor) for a in args) else None
    return [(key, i) for i in range(len(rows))] if isinstance(rows, list | tuple) else None


def _multi_dot(factors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Terms:
    letters = string.ascii_lowercase[: len(factors) + 1]
    terms = [a + b for a, b in pairwise(letters)]
    terms[0] = terms[0] if factors[0].dim() > 1 else terms[0][1:]
    terms[-1] = terms[-1] if factors[-1].dim() > 1 else terms[-1][:1]
    return terms, (letters[0] if factors[0].dim() > 1 else "") + (letters[-1] if factors[-1].dim() > 1 else "")


def _bilinear(factors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Terms:
    batch = _letters(factors[0].dim() - 1)
    return [batch + "i", batch + "j", "oij"], batch + "o"


def _pair(
    first: tuple[int, str],
    second: tuple[int, str],
    terms: Callable[[int, int], Terms] | Callable[[list[Tensor], tuple[Any, ...], dict[str, Any]], Terms | None],
    *,
    by_axes: bool = True,
    added: bool = False,
) -> Product:
    def factors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[At] | None:
        places = [find(args, kwargs, *first), find(args, kwargs, *second)]
        return None if None in places or kwargs.get("out") is not None else places  # type: ignore[return-value]

    def of_axes(operands: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Terms | None:
        return terms(operands[0].dim(), operands[1].dim()) if by_axes else terms(operands, args, kwargs)  # type: ignore[call-arg,arg-type]

    if added:
        return Product(factors, of_axes, lambda args, kwargs: find(args, kwargs, 0, "input"))
    return Product(factors, of_axes)


def _fixed(first: str, second: str, result: str) -> Callable[[int, int], Terms]:
    return lambda x, y: ([first, second], result)


def _products() -> dict[Callable[..., Any], Product]:
    mm, batched = _fixed("mk", "kn", "mn"), _fixed("bmk", "bkn", "bmn")
    vector, outer = _fixed("mk", "k", "m"), _fixed("m", "n", "mn")
    every = {
        "matmul": _pair((0, "input"), (1, "other"), _matmul),
        "mm": _pair((0, "input"), (1, "mat2"), mm),
        "bmm": _pair((0, "input"), (1, "mat2"), batched),
        "mv": _pair((0, "input"), (1, "vec"), vector),
        "dot": _pair((0, "input"), (1, "tensor"), _fixed("k", "k", "")),
        "inner": _pair((0, "input"), (1, "other"), _inner),
        "outer": _pair((0, "input"), (1, "vec2"), outer),
        "ger": _pair((0, "input"), (1, "vec2"), outer),
        "vdot": _pair((0, "input"), (1, "other"), _fixed("k", "k", "")),
        "addmm": _pair((1, "mat1"), (2, "mat2"), mm, added=True),
        "addmv": _pair((1, "mat"), (2, "vec"), vector, added=True),
        "addr": _pair((1, "vec1"), (2, "vec2"), outer, added=True),
        "baddbmm": _pair((1, "batch1"), (2, "batch2"), batched, added=True),
        "addbmm": _pair((1, "batch1"), (2, "batch2"), _fixed("bmk", "bkn", "mn"), added=True),
    }
    table = {getattr(namespace, name): product for name, product in every.items() for namespace in (torch, Tensor)}
    table[Tensor.__matmul__] = every["matmul"]
    table[Tensor.__rmatmul__] = _pair((1, "other"), (0, "input"), _matmul)
    table[torch.linalg.matmul] = every["matmul"]
    table[torch.linalg.vecdot] = _pair((0, "x"), (1, "y"), _vecdot, by_axes=False)
    table[torch.tensordot] = _pair((0, "a"), (1, "b"), _tensordot, by_axes=False)
    table[torch.sparse.mm] = _pair((0, "mat1"), (1, "mat2"), mm)
    table[torch.einsum] = Product(_einsum_factors, _einsum)
    table[torch.linalg.multi_dot] = table[torch.chain_matmul] = Product(_multi_dot_factors, _multi_dot)

    def bilinear(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[At] | None:
        places = [find(args, kwargs, i, name) for i, name in enumerate(("input1", "input2", "weight"))]
        return None if None in places else places  # type: ignore[return-value]

    table[F.bilinear] = Product(bilinear, _bilinear, lambda args, kwargs: find(args, kwargs, 3, "bias"))
    return table


PRODUCTS = _products()
# Products that are added to their first argument in place, and what they are out of place.
OUT_OF_PLACE: dict[Callable[..., Any], Callable[..., Any]] = {
    getattr(namespace, f"{name}_"): getattr(namespace, name)
    for name in ("addmm", "addmv", "addr", "baddbmm", "addbmm")
    for namespace in (torch, Tensor)
    if hasattr(namespace, f"{name}_")
}


def linear_terms(input: Tensor, weight: Tensor) -> Terms | None:
    """F.linear: the last axis is summed."""
    batch = _letters(input.dim() - 1)
    if weight.dim() > 2:
        return None
    made = "n" if weight.dim() == 2 else ""
    return [batch + "k", made + "k"], batch + made
