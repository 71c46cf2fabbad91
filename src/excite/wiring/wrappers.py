"""Models inside wrappers: compiled, data-parallel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

_WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module, without the wrappers of torch.compile and data-parallel training."""
    while (attribute := _WRAPPERS.get(type(model).__name__)) is not None and hasattr(model, attribute):
        model = getattr(model, attribute)
    return model


def eagerly(model: nn.Module) -> AbstractContextManager[object]:
    """A context in which compiled parts of the model run eagerly, so that a torch function mode sees every call once."""
    if any(
        getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    ):
        stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
        return stance
    return nullcontext()
