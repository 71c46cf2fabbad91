"""The plain loss, on the scale of persistent excitation at radius 0."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from excite._core.calls import Pick, pick_output
from excite._core.checks import check_model, check_real, check_tensor, model_errors
from excite._core.wrappers import refuse_lazy
from excite.errors import InputError, ModelError


def squared_error(model: nn.Module, output: Pick = None) -> Callable[[Tensor, Tensor], Tensor]:
    """Builds the squared error: the batch **mean** of (f(x) − y)², the scale of persistent excitation at radius 0.

    Args:
        model: Model with one output per sample.
        output: Which of the model's outputs to use, where it returns several: a key, an index or a function.

    Returns:
        Function `loss(x, y)` for labels of shape (B,) or (B, 1).

    Raises:
        InputError: If the labels do not match the batch (when the loss is called).
        ModelError: If the model does not return one floating-point number per sample (when the loss is called).

    Example:
        >>> loss = squared_error(model)
        >>> loss(x, y).backward()
    """
    refuse_lazy(check_model(model))

    @model_errors
    def loss(x: Tensor, y: Tensor) -> Tensor:
        check_tensor(y, "labels", 1, 2, floating=False)
        f = check_real(pick_output(model(x), output))
        if f.shape not in ((len(x),), (len(x), 1)):
            raise ModelError(f"expected one output per sample, ({len(x)},) or ({len(x)}, 1); got {tuple(f.shape)}")
        if y.numel() != len(x):
            raise InputError(f"expected one label per sample, ({len(x)},) or ({len(x)}, 1); got {tuple(y.shape)}")
        if not f.is_floating_point():
            raise ModelError(f"expected floating-point outputs; got {f.dtype}: return scores, not decisions")
        return (f.reshape(-1) - y.reshape(-1).to(f.dtype)).square().mean()

    return loss
