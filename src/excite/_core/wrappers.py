"""Models that are not quite plain modules: compiled, data-parallel, lazy."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from excite._core.preserve import modules_of
from excite.errors import ModelError

_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module, without the wrappers of torch.compile and data-parallel training."""
    while (attribute := _WRAPPERS.get(type(model).__name__)) is not None and hasattr(model, attribute):
        model = getattr(model, attribute)
    return model


def eagerly(model: nn.Module | Sequence[nn.Module]) -> AbstractContextManager[object]:
    """A context in which compiled parts of the model run eagerly, so that a torch function mode sees every call once.

    Instead of a model the list of its modules, where that is at hand: to collect them takes longer than to ask them.
    """
    for module in model.modules() if isinstance(model, nn.Module) else model:
        if module._compiled_call_impl is None and type(module).__name__ != "OptimizedModule":
            continue
        stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
        return stance
    return nullcontext()


def is_compiled(model: nn.Module) -> bool:
    """Whether the model, or a part of it, is compiled by torch.compile."""
    return any(
        module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )


class _Straight:
    """Takes the place of `CheckpointFunction`: runs the function as it is, with gradients."""

    inside = threading.local()

    @classmethod
    def apply(cls, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        cls.inside.depth = getattr(cls.inside, "depth", 0) + 1
        try:
            return function(*args)
        finally:
            cls.inside.depth -= 1


_lock, _users, _original = threading.Lock(), [0], torch.utils.checkpoint.CheckpointFunction


@contextmanager
def without_reentrant_checkpointing() -> Iterator[None]:
    """A context in which `torch.utils.checkpoint.checkpoint(..., use_reentrant=True)` keeps activations as usual.

    It would run its function without gradients and again in the backward pass: a trial pass would find layers without a
    gradient, and `torch.autograd.grad` is refused. The numbers are the same either way.
    """
    with _lock:
        _users[0] += 1
        torch.utils.checkpoint.CheckpointFunction = _Straight  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        with _lock:
            _users[0] -= 1
            if not _users[0]:
                torch.utils.checkpoint.CheckpointFunction = _original  # type: ignore[misc]


def in_reentrant_checkpoint() -> bool:
    """Whether a call comes from such a function, within `without_reentrant_checkpointing`."""
    return getattr(_Straight.inside, "depth", 0) > 0


def refuse_compiled(model: nn.Module) -> None:
    """Hooks that are added after the first compiled call never fire, and torch says nothing.

    The code compiled for one instance is used for the others of its class as well, so the class decides.
    """
    inner = unwrap(model)
    compiled = type(model).__name__ == "OptimizedModule" or getattr(model, "_compiled_call_impl", None) is not None
    if not compiled or "torch._dynamo" not in sys.modules:
        return
    try:
        from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    except ImportError:
        return
    code = getattr(type(inner).forward, "__code__", None)
    if code is not None and _debug_get_cache_entry_list(code):
        raise ModelError(
            f"a compiled {type(inner).__name__} ran already, so that hooks would never fire: call excite.watch before the "
            "first compiled call, or torch.compiler.reset() before excite.watch"
        )


def refuse_lazy(model: nn.Module) -> None:
    """Lazy modules get their weights from the first batch: before that there are no weights to inspect."""
    lazy = [path for path, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise ModelError(f"parameter {lazy[0]!r} is not initialized yet: run the model once on a batch first")


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 keeps a part of the weights in each process: then every forward pass is one of all processes."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in modules_of(model))


def unsharded_shapes(model: nn.Module) -> nn.Module:
    """A copy of a model sharded by FSDP2 as it was before: full shapes on the meta device, without values, compilation and FSDP's hooks.

    To be traced by one process alone, and without memory for the weights. Modules and tensors that stand in several places do so in
    the copy.
    """
    copies: dict[int, Any] = {}

    def copy_of(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in copies:
                copies[id(value)] = _shape_of(value)
            return copies[id(value)]
        if not isinstance(value, nn.Module):
            return value
        module = unwrap(value)
        if id(module) not in copies:
            result: nn.Module = object.__new__(_class_before(module))
            copies[id(module)] = result
            result.__dict__.update(tree_map(copy_of, _attributes_before(module)))
        return copies[id(module)]

    result: nn.Module = copy_of(model)
    return result


def _shape_of(tensor: Tensor) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _class_before(module: nn.Module) -> type:
    """The class of a module before `fully_shard` gave it one that is derived from it."""
    return (
        type(module).__bases__[1]
        if isinstance(module, sys.modules["torch.distributed.fsdp"].FSDPModule)
        else type(module)
    )


def _attributes_before(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module without FSDP's hooks and without what `module.compile()` leaves."""
    attributes = {name: content for name, content in module.__dict__.items() if name != "_compiled_call_impl"}
    for name in attributes:
        if name.endswith("_hooks"):
            hooks = attributes[name].items()
            own = [
                (key, hook)
                for key, hook in hooks
                if not getattr(hook, "__module__", "").startswith("torch.distributed.")
            ]
            attributes[name] = OrderedDict(own)
    return attributes


def is_shared(model: nn.Module) -> bool:
    """Whether several processes train this model together, by DistributedDataParallel or FSDP2."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    return any(type(module).__name__ == "DistributedDataParallel" for module in model.modules()) or is_sharded(model)


@contextmanager
def resharded(model: nn.Module | Sequence[nn.Module]) -> Iterator[None]:
    """After a forward pass without a backward pass FSDP keeps weights gathered: afterwards they are sharded again."""
    try:
        yield
    finally:
        if "torch.distributed.fsdp" in sys.modules:
            for module in model.modules() if isinstance(model, nn.Module) else model:
                if isinstance(module, sys.modules["torch.distributed.fsdp"].FSDPModule):
                    module.reshard()
