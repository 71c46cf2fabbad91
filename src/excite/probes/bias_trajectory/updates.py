"""Normalized updates of biases, and with them local Lipschitz constants: of a model on data.

For a sample x, z the output of an affine layer and f that of the model, ‖dL/dz‖ / ‖dL/df‖ is the update of that layer's
bias over learning rate and loss derivative (Theorem 1 of *What training reveals*), whatever the loss and its reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from excite._core.calls import Batch, Pick, batch_size, call, check_finite, own_copy, pick_output, tensors
from excite._core.checks import (
    check_count,
    check_model,
    check_number,
    check_tensor,
    check_weights,
    first_line,
    model_errors,
    shown,
)
from excite._core.intercept.affine import AffineCall, AffineMode, Names
from excite._core.preserve import device_of, eval_mode
from excite._core.wrappers import eagerly, refuse_lazy, unwrap, without_reentrant_checkpointing
from excite.errors import InputError, ModelError
from excite.probes.bias_trajectory.exactness import LABELS, applies_link, labels
from excite.probes.bias_trajectory.hooks import row_norms
from excite.probes.bias_trajectory.layer_operators import LayerOperator
from excite.probes.bias_trajectory.ratio_bounds import ratio_and_slope
from excite.probes.bias_trajectory.sites import TracedLayer, find


@dataclass(frozen=True)
class Updates:
    """Normalized updates of one layer's bias, for N samples; NaN for samples without a loss gradient.

    With A the layer as a linear operator, `lower` ≤ `lipschitz` ≤ `upper` (Lemma 1; lower half with the active rows): `values`
    times the smallest singular value of the active rows, and times the largest of A. With the label "vector", `lipschitz` is a
    lower bound of the local Lipschitz constant and `upper` bounds nothing else.

    Attributes:
        layer: Name of the layer.
        values: (N,), ‖dL/dz‖ / ‖dL/df‖.
        lipschitz: (N,), ‖A'dL/dz‖ / ‖dL/df‖; for one output the local Lipschitz constant.
        sigma: Largest singular value of A.
        sigma_error: Relative error of `sigma`; 0 if it is exact.
        active: (N,), smallest singular value of the active rows of A; None where the layer is too large.
        zero: Number of samples without a loss gradient.
        labels: Names of the reservations about these values.

    Example:
        >>> updates = excite.probes.trajectory(model, x)["0"]
        >>> bool((updates.lipschitz <= updates.upper * 1.0001).all())
        True
    """

    layer: str
    values: Tensor
    lipschitz: Tensor
    sigma: float
    sigma_error: float
    active: Tensor | None
    zero: int
    labels: tuple[str, ...]

    @property
    def upper(self) -> Tensor:
        """Upper bound of the input gradient per sample, (N,): the normalized update times σ₁ of the first layer."""
        return self.values * self.sigma

    @property
    def lower(self) -> Tensor | None:
        """Lower bound of the input gradient per sample, (N,), or None: the normalized update times the σ_min of the first layer's active rows."""
        return None if self.active is None else self.values * self.active

    @property
    def mean(self) -> float:
        """Mean over samples; those without a slope are left out."""
        return float(self.values.nanmean())

    @property
    def max(self) -> float:
        """Maximum over samples; NaN if no sample has a slope."""
        known = self.values[~self.values.isnan()]
        return float(known.max()) if len(known) else float("nan")

    def __str__(self) -> str:
        lines = [
            f"bias of {self.layer}: normalized update {self.mean:.6g} in the mean, {self.max:.6g} at most, over "
            f"{len(self.values)} samples ({self.zero} without a loss gradient left out)",
            f"  largest singular value {self.sigma:.6g}: local Lipschitz constants of at most {self.sigma * self.max:.6g}",
        ]
        return "\n".join([*lines, *(f"  {name}: {LABELS[name]}" for name in self.labels)])


class Catch(AffineMode):
    """Keeps the outputs of the chosen calls, as parts of the graph."""

    def __init__(self, names: Names, chosen: Sequence[str]):
        super().__init__(names)
        self.outputs: dict[str, Tensor | None] = dict.fromkeys(chosen)

    def visit(self, call: AffineCall) -> Tensor:
        """Runs an affine call and keeps its output, with a gradient."""
        output = call.run(call.input)
        if call.name not in self.outputs:
            return output
        if not output.requires_grad:  # nothing before it is trained
            output = output.detach().requires_grad_()
        self.outputs[call.name] = output
        return output.clone()  # the model may change it in place


@model_errors
def trajectory(
    model: nn.Module, x: Batch, y: Tensor | None = None, loss: Callable[..., Tensor] | None = None, *, layers: str
    | Sequence[str] = "first", output: Pick = None, batch: int = 250, tolerance: float = 1e-6,
) -> dict[str, Updates]:  # fmt: skip
    """Normalized bias updates that samples would make, ‖dL/dz‖ / ‖dL/df‖ for each sample, by layer.

    The model runs in evaluation mode, so that samples do not influence each other, and is left unchanged.

    Args:
        model: The model.
        x: Inputs, as the model takes them.
        y: Targets, passed to `loss`.
        loss: Function of (output, y), or of the output alone if y is None; any reduction. Not needed for one output.
        layers: "first", "all", or names of layers; a later layer measures the local Lipschitz constant of the part after it (appendix A.7).
        output: Which part of the model's return value is the output, if it returns several.
        batch: Number of samples per pass.
        tolerance: Relative tolerance of the largest singular value of a convolution, computed by Lanczos steps.

    Returns:
        `Updates` by layer name.

    Raises:
        InputError: If an argument is not what is expected, or a layer has no such name.
        ModelError: If no gradient reaches a layer.

    Example:
        >>> updates = excite.probes.trajectory(model, x)
        >>> list(updates), updates["0"].values.shape
        (['0'], torch.Size([6]))
    """
    check_weights(check_model(model))
    batch, tolerance = check_count(batch, "batch"), check_number(tolerance, "tolerance", 0)
    check_finite(x)
    size, model = batch_size(x), unwrap(model)
    refuse_lazy(model)
    if y is not None and (check_tensor(y, "labels", floating=False).dim() == 0 or len(y) != size):
        raise InputError(f"trajectory: expected one label per sample; got {shown(y)} for {size} samples")
    if loss is not None and not callable(loss):
        raise InputError(f"loss: expected a function of the output and the labels; got {shown(loss)}")
    device = device_of(model)
    x = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, x)
    with eval_mode(model), eagerly(model):
        sites = find(model, x, layers)
        known = list(labels(model, x, sites, output))
        chunks: dict[str, list[tuple[Tensor, ...]]] = {site.name: [] for site in sites.chosen}
        for start in range(0, size, batch):
            cut = slice(start, start + batch)
            chunk = own_copy(tree_map(lambda t: t[cut] if isinstance(t, Tensor) and len(t) == size else t, x))  # noqa: B023
            errors, gradients, link = gradients_of(
                model, chunk, None if y is None else y[cut].to(device), loss, [s.name for s in sites.chosen], output
            )
            _check_finite_gradients(errors, gradients)
            if link and "logits" not in known:
                known.append("logits")
            for site in sites.chosen:
                chunks[site.name].append(
                    ratio_and_slope(site, site.separated(gradients[site.name], len(errors)), errors)
                )
        return {site.name: _updates(site, chunks[site.name], tolerance, known) for site in sites.chosen}


def _check_finite_gradients(errors: Tensor, gradients: dict[str, Tensor]) -> None:
    leaves = [leaf for leaf in tree_leaves((errors, gradients)) if isinstance(leaf, Tensor)]
    if not all(bool(torch.isfinite(leaf).all()) for leaf in leaves):
        raise ModelError(
            "expected finite gradients; the model or the loss has NaN or infinite ones at some of the inputs"
        )


def gradients_of(
    model: nn.Module,
    x: Batch,
    y: Tensor | None,
    loss: Callable[..., Tensor] | Tensor | None,
    chosen: Sequence[str],
    output: Pick,
) -> tuple[Tensor, dict[str, Tensor], bool]:
    """‖dL/df‖ (B,), dL/dz by layer, and whether the loss has a sigmoid or softmax. A tensor as loss is dL/df itself."""
    catch, count = Catch(Names(model), chosen), batch_size(x)
    for leaf in tensors(x):
        if leaf.is_floating_point():
            leaf.requires_grad_()
    copied = tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, x)
    with torch.enable_grad(), without_reentrant_checkpointing():
        with catch:
            f = pick_output(call(model, copied), output)
        link = False
        if isinstance(loss, Tensor):
            start = loss
        elif loss is None:
            if f.numel() != count:
                raise InputError(f"trajectory: for outputs {tuple(f.shape)} give loss=, and labels if it needs them")
            start = torch.ones_like(f)
        else:
            number = f.grad_fn._sequence_nr() if f.grad_fn is not None else 0
            try:
                value = loss(f) if y is None else loss(f, y)
            except Exception as error:
                raise InputError(
                    f"loss: the function raised {first_line(error)} on outputs {tuple(f.shape)}"
                ) from error
            if not isinstance(value, Tensor):
                raise InputError(f"loss: expected a function that returns a tensor; it returned {shown(value)}")
            if not value.requires_grad:
                raise InputError("trajectory: the model's output is not connected to the loss: it has no gradient")
            link = applies_link(value.grad_fn, number)
            (start,) = torch.autograd.grad(value.sum(), f, retain_graph=True, materialize_grads=True, allow_unused=True)
        outputs = [z for z in catch.outputs.values() if z is not None]
        if not f.requires_grad:
            raise ModelError("the output has no gradient: the model detaches or rounds it")
        result = torch.autograd.grad(f, outputs, start, allow_unused=True, materialize_grads=True)
    return row_norms(start), dict(zip((k for k, z in catch.outputs.items() if z is not None), result)), link


def _updates(site: TracedLayer, chunks: list[tuple[Tensor, ...]], tolerance: float, known: Sequence[str]) -> Updates:
    values, lipschitz, active = (torch.cat(column) for column in zip(*chunks))
    operator = LayerOperator(site)
    sigma, error = operator.largest(tolerance, max_products=1000)
    names = (*known, "estimated") if error else tuple(known)
    zero = int(values.isnan().sum())
    return Updates(site.name, values, lipschitz, sigma, error, operator.smallest_active(active)(), zero, names)
