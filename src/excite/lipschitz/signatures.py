"""Which linear piece of a piecewise-linear model each point is on: one number per point.

All operators of a forward pass are read, each by its row in `excite.wiring.operators`. The side of its kink that every element
is on, the element that every maximum takes and the outcome of every comparison are hashed into 64 bits per point: two points
with the same number are on the same side of everything (but for a chance of 2⁻⁶⁴). Points between them then are, too, because
everything before the first kink is linear, and so on from kink to kink: the model is linear on the segment from one to the
other. An operator that is not in the table is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from excite._core.calls import Pick, check_finite, pick_output
from excite._core.preserve import eval_mode
from excite._core.wrappers import eagerly, unwrap
from excite.errors import InputError, ModelError
from excite.lipschitz.differentiating import differentiable
from excite.wiring.operators import Pieces
from excite.wiring.propagation.interpreter import lookup, refused_name
from excite.wiring.propagation.schema import bind, is_inplace, name_of


class SamplesMixed(ModelError):
    """An activation whose first axis is not that of the samples."""


_AT_ONCE = 2**20  # numbers of the inputs in one forward pass
_MAX_POINTS = 4096


def signatures(
    model: nn.Module, x: Tensor, *, output: Pick = None, at_once: int | None = None
) -> tuple[Tensor, Tensor, float]:
    """Numbers the linear piece that each point is on.

    Returns the numbers (B,) for x (B, ...), the outputs (B, m), and the largest eps of the dtypes they were computed in. `at_once` is
    the largest number of points in one forward pass, by default that of `points_at_once`.

    The model runs in evaluation mode and is left as it was. Refused where it is not piecewise linear.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() == 0:
        described = f"a tensor of {x.dtype}, {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"expected floating-point inputs with a batch axis in front; got {described}")
    check_finite(x)
    model = unwrap(model)
    at_once = points_at_once(model, x, output=output) if at_once is None else at_once
    size = max(1, min(at_once, _AT_ONCE // max(1, x[:1].numel())))
    patterns, outputs, eps = [], [], torch.finfo(x.dtype).eps
    with eval_mode(model), eagerly(model), torch.no_grad():
        for chunk in x.detach().split(size) if len(x) else [x.detach()]:
            pieces = _Pieces(chunk.clone())
            with pieces:
                returned = pick_output(model(pieces.entered), output)
            if returned.dim() == 0 or len(returned) != len(chunk):
                raise ModelError(
                    f"expected an output with one row per sample, ({len(chunk)}, ...); got {tuple(returned.shape)}: pick it with output="
                )
            patterns.append(pieces.hashed)
            eps = max(eps, pieces.eps)
            outputs.append(returned.flatten(1) if returned.dim() > 1 else returned[:, None])
    return torch.cat(patterns), torch.cat(outputs), eps


def points_at_once(model: nn.Module, x: Tensor, *, output: Pick = None) -> int:
    """How many points `signatures` may take in one forward pass.

    It is 1 where samples do not lie along the first axis of every activation (time first, batch and time merged the other way round),
    because their patterns would be mixed up.

    Determined by three points near the first one: in another order they must have the same numbers, in that order.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() == 0 or len(x) < 2:
        return _MAX_POINTS
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(3, *x.shape[1:], generator=generator, dtype=torch.float64).to(x)
    three = x[:1] + noise * x.abs().amax().clamp(min=1.0)
    try:
        first, again = (signatures(model, order, output=output, at_once=3)[0] for order in (three, three.roll(1, 0)))
    except SamplesMixed:
        return 1
    return _MAX_POINTS if torch.equal(first.roll(1, 0), again) else 1


def check_bend(bend: Tensor, outputs: Tensor, eps: float) -> None:
    """Second differences of the outputs on one piece are rounding, or a row of the table is wrong."""
    if bend.numel() and float(bend.amax()) > 1e4 * eps * max(1.0, float(outputs.abs().amax())):
        raise ModelError("expected a piecewise-linear model; its output bends between kinks")


def check_gradient(
    model: nn.Module, x: Tensor, step: Tensor, change: Tensor, eps: float, *, output: Pick = None
) -> None:
    """Checks autograd's derivative along `step` (K, ...) against the change (K, m) of the outputs within the linear piece.

    They differ where the model detaches something, or has a backward pass of its own (straight-through): a ModelError.
    """
    if not len(x):
        return
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(change.shape[1], generator=generator, dtype=torch.float64).to(change)
    expected = change @ weights
    size = max(1, min(_MAX_POINTS, _AT_ONCE // x[:1].numel()))
    with eval_mode(model), eagerly(model), torch.enable_grad(), differentiable():
        for points, along, target in zip(x.split(size), step.split(size), expected.split(size)):
            leaf = points.detach().clone().requires_grad_()
            outputs = pick_output(model(leaf), output).reshape(len(points), -1)
            (gradient,) = torch.autograd.grad((outputs @ weights.to(outputs)).sum(), leaf)
            terms = (gradient * along)[:, None].flatten(1)
            off = (terms.sum(1) - target).abs()
            # The changes are rounded as the outputs are; some derivatives (hardsigmoid's) are of single precision.
            largest = max(1.0, float(outputs.detach().abs().amax()))
            rounding = 1e4 * eps * largest * float(weights.norm()) + 1e-6 * terms.abs().sum(1)
            if bool((off > rounding).any()):
                raise ModelError(
                    "expected a model whose gradient is that of its output; here the output moves otherwise than its gradient says: "
                    "something in it is detached, or has a backward pass of its own (a straight-through estimator)"
                )


# On values that depend on the input they make shapes or branches depend on it, for all samples at once.
_BRANCHES = ("_local_scalar_dense", "equal", "nonzero", "nonzero_static", "_unique2", "unique_dim", "masked_select")


class _Pieces(TorchDispatchMode):
    """Follows what depends on the input, operator by operator, and hashes the pattern of each (`excite.wiring.operators`).

    Tensors are known by their storage, so that writing into a view is not missed. `_moving` change within a piece;
    `_pinned` were made from patterns alone, so that on each piece they are constants.
    """

    def __init__(self, entered: Tensor):
        super().__init__()  # type: ignore[no-untyped-call]
        self.entered = entered
        self.hashed = torch.zeros(len(entered), dtype=torch.int64, device=entered.device)
        # Kept alive, so that no other tensor gets the same storage.
        self._moving: dict[int, Tensor] = {_storage(entered): entered}
        self._pinned: dict[int, Tensor] = {}
        self._count = 0
        self.eps = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # saying "skip" imports the compiler first, which takes seconds; everything here runs eagerly

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not self._moves((args, kwargs)):
            return self._pin(func, args, kwargs)
        pieces = _pieces_of(func)
        a = SimpleNamespace()
        if pieces.pattern or pieces.factors or pieces.fixed or pieces.unless or name_of(func) == "index":
            a = bind(func, args, kwargs)
            self._check(pieces, a)
        if pieces.pattern and is_inplace(func):  # its pattern is that of what was there before
            a.self = a.self.clone()
        result = func(*args, **kwargs)
        if pieces.linearity == "constant":
            return result
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        patterns = (
            [] if pieces.pattern is None else [tensor for tensor in pieces.pattern(a, result) if tensor is not None]
        )
        if pieces.linearity == "discrete":
            patterns = leaves
        known = {id(tensor) for tensor in patterns}
        for pattern in [*patterns, *(tensor for tensor in leaves if not _real(tensor) and id(tensor) not in known)]:
            self._hash(pattern)
        for leaf in leaves:
            moving = pieces.linearity != "discrete" and _real(leaf)
            (self._moving if moving else self._pinned)[_storage(leaf)] = leaf
            if moving:
                self.eps = max(self.eps, torch.finfo(leaf.dtype).eps)
        return result

    def _moves(self, arguments: Any) -> bool:
        return any(isinstance(leaf, Tensor) and _storage(leaf) in self._moving for leaf in tree_leaves(arguments))

    def _pin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator on constants, or on what is constant on each piece."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ModelError(f"expected a model that is a function of its input; {name_of(func)} draws random numbers")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(_storage(leaf) in self._pinned for leaf in tensors):
            return func(*args, **kwargs)
        if name_of(func) in _BRANCHES:
            raise ModelError(f"cannot separate samples: {name_of(func)} branches on values of the whole batch")
        result = func(*args, **kwargs)
        self._pinned.update({_storage(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)})
        return result

    def _check(self, pieces: Pieces, a: SimpleNamespace) -> None:
        """Refuse what is not piecewise linear in the arguments that move."""
        why = pieces.unless(a) if pieces.unless is not None else None
        if why:
            raise ModelError(f"expected a piecewise-linear model; {a.op.strip('_')} {why}")
        if sum(self._moves([getattr(a, operand, None) for operand in group]) for group in pieces.factors) > 1:
            raise ModelError(f"expected a piecewise-linear model; {a.op} multiplies two signals with each other")
        for operand in pieces.fixed:
            if self._moves(getattr(a, operand, None)):
                use = "divides by" if a.op.startswith(("div", "true_div", "addcdiv")) else f"{a.op} takes as {operand}"
                raise ModelError(f"expected a piecewise-linear model; it {use} something that depends on the input")
        if a.op == "index" and any(
            operand is not None and operand.dtype in (torch.bool, torch.uint8) and _storage(operand) in self._pinned
            for operand in a.indices
        ):
            raise ModelError(
                "cannot separate samples: a mask that depends on the input selects elements of all of them"
            )

    def _hash(self, pattern: Tensor) -> None:
        """Add one random 64-bit number for every element, times what it is; sums wrap around."""
        batch = len(self.hashed)
        if not batch or not pattern.numel():
            return
        if pattern.dim() == 0 or pattern.shape[0] % batch:
            raise SamplesMixed(
                f"cannot separate samples: expected {batch} along the first axis of every activation; got {tuple(pattern.shape)}"
            )
        flat = _bits(pattern).reshape(batch, -1)
        self._count += 1
        generator = torch.Generator().manual_seed(self._count)
        numbers = torch.randint(-(2**63), 2**63 - 1, (flat.shape[1],), generator=generator)
        self.hashed += (flat * numbers.to(flat.device)).sum(1)


@cache
def _pieces_of(func: Any) -> Pieces:
    """How an operator depends on its arguments, if it can be piecewise linear."""
    namespace, _, full = str(func._schema.name).partition("::")
    name = refused_name(func)
    row = lookup(func)
    pieces = None if row is None else row.pieces
    if pieces is None:
        raise ModelError(
            f"cannot tell linear pieces apart through {name if namespace == 'aten' else f'{namespace}::{full}'}: the operator "
            "table (excite.wiring.operators) has no column 'pieces' for it; use excite.lipschitz.local, which needs no linear "
            "regions"
        )
    if pieces.linearity == "smooth":
        raise ModelError(
            f"expected a piecewise-linear model; {name.strip('_')} is not: ask for its output before that, or use "
            "excite.lipschitz.local, which needs no linear regions"
        )
    return pieces


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _bits(pattern: Tensor) -> Tensor:
    """Whole numbers that are equal where those of the pattern are."""
    if not pattern.is_floating_point():
        return pattern.long()
    dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}[pattern.element_size()]
    bits = (pattern + 0.0).contiguous().view(dtype).long()  # −0 is 0
    # Small floats differ in their leading bits alone, of which a product keeps few: spread them over all 64.
    bits = (bits ^ (bits >> 32)) * 0x5851F42D4C957F2D
    return bits ^ (bits >> 29)
