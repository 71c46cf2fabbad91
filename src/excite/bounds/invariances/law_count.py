"""How many conservation laws there are: the Lie algebra of the gradients (Marcotte, Gribonval and Peyré 2023).

A function of the weights is conserved by gradient flow for every loss and all data if its gradient is orthogonal to W(θ), the span
of the gradients of the outputs at all inputs. A function that is constant along two vector fields is constant along their
bracket [X, Y] = DY·X − DX·Y too, so it is orthogonal to all that W generates, and by Frobenius' theorem

    number of independent laws = parameters − dim Lie(W)(θ)    at generic θ.

The rank of W alone is not enough: for U V' with r columns it leaves r² functions, where r(r + 1)/2 are conserved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vmap

from excite._core.calls import Batch, Pick, arguments, call, pick_output
from excite._core.checks import check_count, check_model, check_weights, model_errors
from excite._core.intercept.affine import clean_path
from excite._core.preserve import preserve_state
from excite._core.wrappers import refuse_lazy, unwrap
from excite.errors import InputError, ModelError
from excite.wiring.groups import Group
from excite.wiring.tracing import trace
from excite.wiring.translations import Translation

_EXACT = 1e-8  # singular values below this fraction of the largest are zero
_MORE = 8  # random vectors beyond the number of parameters, in every generation of brackets
_LIMIT = 500
Field = Callable[..., Tensor]


@dataclass(frozen=True)
class LawCount:
    """The number of conservation laws of a model at its weights, and how many of them are known.

    Attributes:
        parameters: Number of weights D.
        rank: Dimension of the span of the gradients of the outputs.
        dimension: Dimension of the Lie algebra that these generate.
        laws: Number of independent conservation laws, D − dimension.
        known: Number of independent laws among those of `excite.trace` and, for "cross_entropy", the translations of the last
            layer.
        gap: Smallest singular value that counts over the largest that does not: far above 1 if the dimension is certain.
        generations: By generation of brackets, the dimension reached.
        angle: Largest cosine between the gradient of a known law and the Lie algebra: rounding, if they are laws.
        enough_data: Whether half of the samples give the same rank; if not, more samples can lower the number of laws.
        loss: "any" or "cross_entropy".

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)).double()
        >>> count = excite.bounds.count_laws(model, torch.randn(8, 3, dtype=torch.float64))
        >>> count.parameters, count.rank, count.dimension, count.laws, count.complete
        (12, 8, 9, 3, True)
    """

    parameters: int
    rank: int
    dimension: int
    laws: int
    known: int
    gap: float
    generations: tuple[int, ...]
    angle: float
    enough_data: bool
    loss: str

    @property
    def complete(self) -> bool:
        """Whether the known laws are all of them."""
        return self.known == self.laws and self.enough_data

    def __str__(self) -> str:
        missing = self.laws - self.known
        state = "all of them are known" if not missing else f"{self.known} are known"
        more = "" if self.enough_data else "; more samples can lower the number"
        return (
            f"{self.laws} conservation laws ({self.parameters} parameters, Lie algebra of dimension {self.dimension}, gap "
            f"{self.gap:.0e}): {state}{more}"
        )


@model_errors
def count_laws(
    model: nn.Module,
    example: Batch,
    *,
    loss: Literal["any", "cross_entropy"] = "any",
    output: Pick = None,
    limit: int = 100,
) -> LawCount:
    """Counts the conservation laws of a small model at its weights, and checks whether `excite.trace` knows all of them.

    The Lie algebra is found numerically: gradients of the outputs at all samples, then brackets of random combinations,
    generation by generation, until the dimension stays. Use float64, generic weights (random, not zeros), and generic
    samples, several times as many as a sample has entries. All weights count as trained.

    Args:
        model: The model, of at most `limit` parameters.
        example: A batch as the model takes it.
        loss: "any": laws for every loss of the outputs. "cross_entropy": laws for losses that see differences of the outputs
            along the last axis only, as the softmax does: then the sums of the last layer over the classes are conserved too.
        output: Selects the output of a model that returns several.
        limit: Largest number of parameters, at most 500. Time grows with its third power.

    Returns:
        The number of laws, of known laws, and how certain it is.

    Raises:
        InputError: If the model has more parameters, or `loss` is none of the two.
        ModelError: If the weights are not float64.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 2, bias=False)).double()
        >>> print(excite.bounds.count_laws(model, torch.randn(40, 3, dtype=torch.float64)).laws)
        4
    """
    if loss not in ("any", "cross_entropy"):
        raise InputError(f'loss: expected "any" or "cross_entropy"; got {loss!r}')
    model, weights = _checked(model, limit)
    total = sum(p.numel() for p in weights.values())
    wiring = trace(model, example, output=output)
    with preserve_state(model):
        returned = pick_output(call(model, example), output).dtype
        if returned != torch.float64:
            raise ModelError(f"expected outputs in float64; got {returned}: use model.double() and a batch in float64")
        outputs = _outputs(model, weights, example, output, loss)
        flat = torch.cat([p.reshape(-1) for p in weights.values()])
        jacobian = jacrev(outputs)(flat)
        rank, dimension, generations, gap, algebra = _closure(outputs, flat, jacobian)
        half = torch.linalg.matrix_rank(_unit(jacobian[: len(jacobian) // 2]), rtol=_EXACT)
    known = _unit(_known(wiring.groups, wiring.translations if loss == "cross_entropy" else (), weights))
    angle = float((known @ algebra).abs().max()) if len(known) and algebra.shape[1] else 0.0
    independent = int(torch.linalg.matrix_rank(known, rtol=_EXACT)) if len(known) else 0
    return LawCount(
        total, rank, dimension, total - dimension, independent, gap, generations, angle, int(half) == rank, loss
    )


def _checked(model: nn.Module, limit: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """The unwrapped model and its weights in float64, of at most `limit` numbers."""
    limit = check_count(limit, "limit", maximum=_LIMIT)
    model = check_weights(unwrap(check_model(model)))
    refuse_lazy(model)
    weights = {clean_path(path): p.detach().clone() for path, p in model.named_parameters()}
    total = sum(p.numel() for p in weights.values())
    if total > limit:
        raise InputError(f"the model has {total} parameters, of at most limit={limit}: take a smaller one of its kind")
    if any(p.dtype != torch.float64 for p in weights.values()):
        raise ModelError("the weights are not float64, which the rank needs: use model.double() and a batch in float64")
    return model, weights


def _outputs(
    model: nn.Module, weights: dict[str, Tensor], example: Batch, output: Pick, loss: str
) -> Callable[[Tensor], Tensor]:
    """The outputs at all samples as one vector, by the weights as one vector."""
    sizes = [p.numel() for p in weights.values()]
    args, kwargs = arguments(model, example)

    def outputs(flat: Tensor) -> Tensor:
        chunks = dict(zip(weights, flat.split(sizes)))
        named = {path: chunk.view(weights[path].shape) for path, chunk in chunks.items()}
        returned = pick_output(functional_call(model, named, args, kwargs), output)
        if loss == "cross_entropy":
            returned = returned - returned.mean(-1, keepdim=True)
        return returned.reshape(-1)

    return outputs


def _closure(
    outputs: Callable[[Tensor], Tensor], flat: Tensor, jacobian: Tensor
) -> tuple[int, int, tuple[int, ...], float, Tensor]:
    """Rank of the gradients, dimension of what they generate, the dimensions on the way, the gap, and an orthonormal basis."""
    generator = torch.Generator().manual_seed(0)
    count = len(flat) + _MORE
    vectors = _unit(jacobian)
    basis, gap = _basis(vectors)
    dimensions = [basis.shape[1]]
    field: Field = _gradient(outputs)
    depth = 1
    while dimensions[-1] < len(flat):
        field, depth = _bracket(field, _gradient(outputs), depth), depth + 1
        weights = torch.randn(count, depth, len(jacobian), generator=generator, dtype=flat.dtype)
        result = vmap(lambda c, f=field: f(flat, *c))(weights)
        basis, gap = _basis(torch.cat([basis.T, _unit(result)]))
        dimensions.append(basis.shape[1])
        if dimensions[-1] == dimensions[-2]:
            break
    return dimensions[0], dimensions[-1], tuple(dimensions), gap, basis


def _gradient(outputs: Callable[[Tensor], Tensor]) -> Field:
    """The gradient of Σ c_i output_i, for coefficients c."""

    def field(flat: Tensor, coefficients: Tensor) -> Tensor:
        return torch.func.grad(lambda w: outputs(w) @ coefficients)(flat)  # type: ignore[no-any-return]

    return field


def _bracket(field: Field, gradient: Field, depth: int) -> Field:
    """[X, Y] = DY·X − DX·Y for a field Y of `depth` coefficients and a gradient X."""

    def bracket(flat: Tensor, *coefficients: Tensor) -> Tensor:
        first, remaining = coefficients[0], coefficients[1 : depth + 1]
        x, y = (lambda w: gradient(w, first)), (lambda w: field(w, *remaining))
        return jvp(y, (flat,), (x(flat),))[1] - jvp(x, (flat,), (y(flat),))[1]  # type: ignore[no-any-return, no-untyped-call]

    return bracket


def _unit(rows: Tensor) -> Tensor:
    """Rows of length one; those that vanish are left out."""
    length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    nonzero = (length > 1e-100).squeeze(1)
    return rows[nonzero].div(length[nonzero])


def _basis(rows: Tensor) -> tuple[Tensor, float]:
    """An orthonormal basis of the rows, as columns, and the gap between singular values that count and those that do not."""
    _, values, right = torch.linalg.svd(rows, full_matrices=False)
    rank = int((values > _EXACT * values[0]).sum()) if len(values) else 0
    below = float(values[rank]) if rank < len(values) else 0.0
    gap = float(values[rank - 1]) / max(below, torch.finfo(rows.dtype).eps * float(values[0])) if rank else 0.0
    return right[:rank].T, gap


def _known(groups: Sequence[Group], translations: Sequence[Translation], weights: dict[str, Tensor]) -> Tensor:
    """The gradients of the laws that a trace knows, as rows."""
    sizes = [p.numel() for p in weights.values()]

    def values(flat: Tensor) -> Tensor:
        tensors = {path: chunk.view(weights[path].shape) for path, chunk in zip(weights, flat.split(sizes))}
        result = [flat.new_zeros(0)]
        for group in groups:
            if group.law == "none":
                continue
            total = flat.new_zeros(group.channels, group.channels)
            for sites, sign in ((group.producers, 1), (group.consumers, -1)):
                for site in sites:
                    rows = site.rows(tensors[site.parameter])
                    total = total + sign * site.times * rows @ rows.T
            upper = torch.triu_indices(*total.shape)
            result.append(total[upper[0], upper[1]] if group.law == "matrix" else total.diagonal())
        return torch.cat([*result, *(translation.sums(tensors) for translation in translations)])

    flat = torch.cat([p.reshape(-1) for p in weights.values()])
    return jacrev(values)(flat)  # type: ignore[no-any-return]
