"""Models that are not quite plain modules: compiled, data-parallel, lazy."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from excite.errors import ModelError

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


def refuse_lazy(model: nn.Module) -> None:
    """Lazy modules get their weights from the first batch: before that there is nothing to look at."""
    lazy = [path for path, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise ModelError(f"parameter {lazy[0]!r} is not initialized yet: run the model once on a batch first")
