"""The graph of a model as `torch.export` sees it, with every parameter under its own name."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import transformer
from torch.utils._pytree import tree_leaves, tree_map

from excite._core.calls import Batch, Pick, arguments, batch_size, call, pick_output
from excite._core.intercept.affine import clean_path
from excite._core.preserve import preserve_state
from excite._core.wrappers import eagerly, unwrap, without_reentrant_checkpointing
from excite.errors import ModelError


class ExportFailed(Exception):
    """`torch.export` could not follow the model; the message is its first line."""


@dataclass(frozen=True)
class Exported:
    """The nodes of the graph in order, and what its placeholders stand for.

    `parameters` and `constants` are keyed by the names of placeholder nodes. A parameter that is tied to another (the
    same tensor under two paths) appears under the first path.
    """

    graph: torch.fx.Graph
    module: torch.fx.GraphModule
    parameters: dict[str, str]
    constants: dict[str, Tensor]


class _Picked(nn.Module):
    """The model with one tensor as its output."""

    def __init__(self, inner: nn.Module, output: Pick):
        super().__init__()
        self.inner = inner
        self._output = output
        self.training = inner.training

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return pick_output(self.inner(*args, **kwargs), self._output)


def resized(batch: Batch, size: int) -> Batch:
    """The batch with `size` samples: its first ones, repeated if there are too few."""
    current_size = batch_size(batch)

    def resize(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == current_size:
            return leaf[torch.arange(size, device=leaf.device) % current_size]
        return leaf

    return tree_map(resize, batch)  # type: ignore[no-any-return]


def does_not_run(error: Exception, batch: Batch) -> ModelError:
    """The error for a model that fails on some samples of the example."""
    shapes = ", ".join(str(tuple(leaf.shape)) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    line = (str(error).splitlines() or [""])[0]
    return ModelError(
        f"the model does not run on a few samples of the example (shapes {shapes}): {type(error).__name__}: {line}; "
        "give one batch as the model takes it, with a model that takes any number of samples"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # A failing export prints the graph so far and logs advice that speaks to people who write exporters.
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


@contextlib.contextmanager
def _masks_unread() -> Iterator[None]:
    """PyTorch's transformers compare a mask with the causal one, which a graph cannot; the mask itself gives the same attention."""
    original = getattr(transformer, "_detect_is_causal_mask", None)
    if original is None:
        yield
        return
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        transformer._detect_is_causal_mask = original


def exported(model: nn.Module, batch: Batch, output: Pick = None, *, only_output: bool = False) -> Exported:
    """The graph of `model` on two samples of `batch`, in the model's own mode; the model is left as it was.

    All outputs are kept, since every one of them may enter the loss. With `only_output`, or where the model returns
    something that export cannot carry, the graph ends in the tensor that `output` picks.
    """
    model = unwrap(model)
    if not only_output:
        try:
            return _export(model, model, batch)
        except ExportFailed:
            if output is None:
                raise
    return _export(model, _Picked(model, output), batch)


def _export(model: nn.Module, root: nn.Module, batch: Batch) -> Exported:
    two = resized(batch, 2)
    args, kwargs = arguments(model, two)
    try:
        # Under grad mode, because without it transformer layers take a fused path that hides their parts.
        with (
            preserve_state(model), _quiet(), _masks_unread(), torch.enable_grad(), without_reentrant_checkpointing()
        ):  # fmt: skip
            program = torch.export.export(root, args, kwargs, strict=False)
    except Exception as error:  # any failure of torch.export: the model has no graph, which is a valid result
        line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ExportFailed(line.strip()) from error

    for item in program.graph.nodes:
        if str(getattr(item.target, "__module__", "")).startswith("torch._functorch"):
            raise ExportFailed("the model uses torch.vmap or torch.func, inside which layers are not followed")
        value = item.meta.get("val")
        if isinstance(value, Tensor) and not all(isinstance(size, int) for size in value.shape):
            raise ExportFailed(f"the shape of the output of {item.name} depends on the values in the batch")

    prefix = "inner." if root is not model else ""
    first: dict[int, str] = {}
    canonical: dict[str, str] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        canonical[prefix + path] = first.setdefault(id(parameter), clean_path(path))
    signature = program.graph_signature
    constants: dict[str, Tensor] = {}
    for node, target in signature.inputs_to_buffers.items():
        value = program.state_dict.get(target, program.constants.get(target))
        if isinstance(value, Tensor):
            constants[node] = value.detach().clone()  # the graph may change it in place
    for node, target in signature.inputs_to_lifted_tensor_constants.items():
        value = program.constants.get(target)
        if isinstance(value, Tensor):
            constants[node] = value.detach().clone()
    parameters = {node: canonical[target] for node, target in signature.inputs_to_parameters.items()}
    return Exported(program.graph, program.graph_module, parameters, constants)


def run(model: nn.Module, batch: Batch) -> Any:
    """One forward pass without gradients and without a trace; compiled parts run eagerly, so that modes see them."""
    with preserve_state(model), torch.no_grad(), eagerly(model), without_reentrant_checkpointing():
        return call(model, batch)
