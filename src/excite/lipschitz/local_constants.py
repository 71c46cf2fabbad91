"""Exact local Lipschitz constants: the norm of the Jacobian at each point."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from excite._core.calls import Pick, check_finite, pick_output
from excite._core.checks import Norm, check_dense, check_model, check_tensor, check_weights, model_errors, parse_norm
from excite._core.preserve import eval_mode
from excite._core.wrappers import eagerly
from excite.errors import InputError, ModelError
from excite.lipschitz.differentiating import differentiable

_MAX_ENTRIES = 2**25  # of all Jacobians held at once: 256 MB in double precision


@model_errors
def local(model: nn.Module, x: Tensor, norm: object = "2", *, output: Pick = None) -> Tensor:
    """Computes the local Lipschitz constant of a model at each point: max ‖J v‖ over ‖v‖ = 1.

    J is the Jacobian of the output with respect to one input, both flattened; input and output have the same norm. That is
    the largest singular value for "2", the largest sum of absolute values in a row for "inf" and in a column for "1"; for a
    scalar output, the dual norm of the gradient. Exact wherever the model is differentiable (at a kink: for the derivative
    that autograd takes). The model runs in evaluation mode and is left unchanged; samples must not influence each other.

    Args:
        model: Any differentiable model.
        x: Points (B, ...).
        norm: "2", "inf" or "1".
        output: Selects the output of a model that returns a tuple or a dict, by index, key or function.

    Returns:
        Tensor (B,) with one constant per point.

    Raises:
        ModelError: If the output has no gradient, not one row per sample, or infinite derivatives.
        InputError: If the points are not finite floating-point numbers with a batch axis.

    Example:
        >>> excite.lipschitz.local(nn.Linear(2, 1), torch.zeros(3, 2)).shape
        torch.Size([3])
    """
    name = parse_norm(norm)
    check_weights(check_model(model))
    check_tensor(x, "inputs")
    if x.dim() == 0:
        raise InputError("expected inputs with a batch axis in front; got a tensor without axes")
    check_finite(x)
    if not len(x):
        return x.new_zeros(0)
    with eval_mode(model), eagerly(model), torch.enable_grad(), differentiable():
        first, outputs = _forward(model, x[:1], output)
        size = max(1, _MAX_ENTRIES // max(1, outputs.shape[1] * first[0].numel())) if name == "2" else len(x)
        constants = torch.cat([_norms(*_forward(model, chunk, output), name) for chunk in x.split(size)])
    if not bool(torch.isfinite(constants).all()):
        raise ModelError("expected finite derivatives; the Jacobian has NaN or infinite values at some of the inputs")
    return constants


def _forward(model: nn.Module, x: Tensor, output: Pick) -> tuple[Tensor, Tensor]:
    """The inputs as leaves of a graph, and the outputs as (B, m)."""
    leaf = x.detach().clone().requires_grad_()
    outputs = pick_output(model(leaf), output)
    if outputs.dim() == 0 or len(outputs) != len(x):
        raise ModelError(
            f"expected an output with one row per sample, ({len(x)}, ...); got {tuple(outputs.shape)}: pick it with output="
        )
    if not outputs[0].numel() or not x[0].numel():
        raise ModelError(
            f"expected at least one number per input and output; got {tuple(x.shape)} and {tuple(outputs.shape)}"
        )
    check_dense(outputs, "outputs")
    if not outputs.is_floating_point():
        raise ModelError(f"expected outputs of real floating-point numbers; got {outputs.dtype}")
    if not outputs.requires_grad:
        raise ModelError("the output has no gradient with respect to the input: the model detaches or rounds it")
    return leaf, outputs.reshape(len(x), -1)


def _norms(leaf: Tensor, outputs: Tensor, norm: Norm) -> Tensor:
    """One backward pass per output serves all points, since each output row depends on its own point only."""
    rows = []
    result: Tensor = leaf.new_zeros(len(leaf))
    columns = torch.zeros_like(leaf)[:, None].flatten(1)
    for i in range(outputs.shape[1]):
        (row,) = torch.autograd.grad(
            outputs[:, i].sum(), leaf, retain_graph=i + 1 < outputs.shape[1], materialize_grads=True
        )
        row = row[:, None].flatten(1)  # (B, d)
        if norm == "inf":
            result = torch.maximum(result, row.abs().sum(1))
        elif norm == "1":
            columns = columns + row.abs()
        else:
            rows.append(row)
    if norm == "1":
        return columns.amax(1)
    if norm == "inf":
        return result
    if len(rows) == 1:
        result = torch.linalg.vector_norm(rows[0], dim=1)
    else:
        result = torch.linalg.matrix_norm(torch.stack(rows, 1), ord=2)
    return result
