"""How a model is called on a batch, and which tensor of what it returns is *the* output.

A batch is a tensor, a tuple of positional arguments or a dict of keyword arguments (or the dict that a model takes as its
only argument); the first axis of every tensor in it is the batch axis.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from excite._core.checks import check_dense, first_line, shown
from excite._core.wrappers import unwrap
from excite.errors import ExciteError, InputError, ModelError

Batch = Tensor | tuple[Any, ...] | dict[str, Any]
Pick = str | int | Callable[[Any], Tensor] | None


def call(model: nn.Module, batch: Batch) -> Any:
    """`model(batch)`, `model(*batch)` or `model(**batch)`."""
    args, kwargs = arguments(model, batch)
    return model(*args, **kwargs)


def arguments(model: nn.Module, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of a batch.

    A dict has the keyword arguments, or is the only argument of a model that does not take its keys.
    """
    if isinstance(batch, tuple):
        return batch, {}
    if isinstance(batch, dict) and (_takes(model, **batch) or not _takes(model, batch)):
        return (), batch
    return (batch,), {}


def _takes(model: nn.Module, *args: Any, **kwargs: Any) -> bool:
    try:
        inspect.signature(unwrap(model).forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


def tensors(batch: Batch) -> list[Tensor]:
    """All tensors of a batch, in order."""
    leaves = [check_dense(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if not leaves:
        raise InputError(f"expected a tensor, a tuple or a dict of tensors as input; got {type(batch).__name__}")
    return leaves


def batch_size(batch: Batch) -> int:
    """Number of samples of a batch, at least one."""
    first = tensors(batch)[0]
    if first.dim() == 0:
        raise InputError("expected inputs with a batch axis in front; got a tensor without axes")
    if first.shape[0] == 0:
        raise InputError(f"expected at least one sample; got an empty batch of shape {tuple(first.shape)}")
    return int(first.shape[0])


def own_copy(batch: Batch) -> Batch:
    """The batch outside any graph and in memory of its own: a model may change its input in place."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, batch)  # type: ignore[no-any-return]


def repeated(batch: Batch, times: int, size: int | None = None) -> Batch:
    """The batch `times` times in a row: (B, ...) becomes (times·B, ...) in every tensor whose first axis is the batch.

    `size` is B, where that is known.
    """
    size = batch_size(batch) if size is None else size

    def repeat(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size:
            return torch.cat([leaf] * times)
        return leaf

    return tree_map(repeat, batch)  # type: ignore[no-any-return]


def check_finite(batch: Batch, what: str = "inputs") -> None:
    """Raises an InputError if a floating-point tensor of the batch holds NaN or infinity."""
    for leaf in tensors(batch):
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            bad = int((~torch.isfinite(leaf)).sum())
            raise InputError(
                f"expected finite {what}; {bad} of {leaf.numel()} values are NaN or infinite: clean the data"
            )


def pick_output(returned: Any, output: Pick = None) -> Tensor:
    """The output tensor of a model: what it returned, or the part that `output` names (key, index or function)."""
    if callable(output):
        try:
            returned = output(returned)
        except ExciteError:
            raise
        except Exception as error:
            raise InputError(f"output: the function raised {first_line(error)} on {_describe(returned)}") from error
    elif output is not None:
        if isinstance(returned, Tensor):
            raise InputError(
                f"output={shown(output)} picks a part of a tuple or a dict; the model returned a tensor: leave output out, or give a function"
            )
        try:
            if isinstance(output, str) and not isinstance(returned, Mapping):
                returned = getattr(returned, output)
            else:
                returned = returned[output]
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise InputError(
                f"output={shown(output)} is not in what the model returned ({_describe(returned)})"
            ) from error
    if not isinstance(returned, Tensor):
        raise ModelError(
            f"the model returned {_describe(returned)}, not a tensor: say which part is the output, as in output='logits' or output=0"
        )
    return check_dense(returned, "outputs")


def _describe(returned: Any) -> str:
    if isinstance(returned, Mapping):
        return f"a {type(returned).__name__} with keys {', '.join(map(repr, returned))}"
    if isinstance(returned, tuple | list):
        return f"a {type(returned).__name__} of {len(returned)}"
    return f"a {type(returned).__name__}"
