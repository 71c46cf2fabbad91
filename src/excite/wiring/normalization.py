"""Run a model as it is trained, but for dropout: which statistics its normalizations use while Excite measures.

Early in training the running statistics of a batch normalization are those of an untrained network. In evaluation mode the
model would then be a function that is not trained. So a normalization that training runs with the statistics of the batch
gets those of the batch that is measured, as constants: samples stay independent, and gradients are those of each sample.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from excite._core.calls import Batch, call, own_copy
from excite._core.intercept.affine import clean_path
from excite._core.preserve import eval_mode, modules_of, preserve_state

# "example": mean and variance of the measured batch; "running": running statistics, because the normalization is in
# evaluation mode (frozen); "few": running statistics, because the batch has one value per channel.
Source = Literal["example", "running", "few"]

_MODULE = ("input", "running_mean", "running_var", "weight", "bias")
_BUILTIN = ("input", "weight", "bias", "running_mean", "running_var")
_BATCH: dict[Callable[..., Any], tuple[str, ...]] = {
    F.batch_norm: (*_MODULE, "training", "momentum", "eps"),
    torch.batch_norm: (*_BUILTIN, "training", "momentum", "eps", "cudnn_enabled"),
}
_INSTANCE: dict[Callable[..., Any], tuple[str, ...]] = {
    F.instance_norm: (*_MODULE, "use_input_stats", "momentum", "eps"),
    torch.instance_norm: (*_BUILTIN, "use_input_stats", "momentum", "eps", "cudnn_enabled"),
}


class TrainingStatistics(TorchFunctionMode):
    """While active, normalizations whose running mean is in `trained` use the statistics of what they get.

    `sources` then says for every normalization that was called which ones it used. Buffers are neither read nor written
    for these. Normalizations that keep no running statistics always use those of the batch.
    """

    def __init__(self, model: nn.Module, trained: set[int]):
        super().__init__()
        self.sources: dict[str, Source] = {}
        self._model, self._trained = model, trained

    @cached_property
    def _names(self) -> dict[int, str]:
        return {
            id(tensor): clean_path(path)
            for path, module in self._model.named_modules()
            for tensor in (*module._buffers.values(), module._parameters.get("weight"))
            if tensor is not None
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _BATCH:
            return self._batch(func, dict(zip(_BATCH[func], args)) | kwargs, args, kwargs)
        if func in _INSTANCE:
            return self._instance(func, dict(zip(_INSTANCE[func], args)) | kwargs, args, kwargs)
        return func(*args, **kwargs)

    def _batch(
        self, func: Callable[..., Any], arguments: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        x, running = arguments["input"], arguments.get("running_mean")
        if not arguments.get("training", False) and id(running) not in self._trained:
            return self._as_it_came("running", func, arguments, args, kwargs)
        if x.numel() <= x.shape[1]:
            return self._as_it_came("few", func, arguments, args, kwargs)
        self._note(arguments, "example")
        weight, bias, eps = arguments.get("weight"), arguments.get("bias"), arguments.get("eps", 1e-5)
        if not torch.is_grad_enabled():
            return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
        like = next((t for t in (running, arguments.get("weight")) if t is not None), x)
        wide = torch.promote_types(x.dtype, torch.float32)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        variance, mean = torch.var_mean(x.detach().to(wide), axes, correction=0)
        return F.batch_norm(x, mean.to(like.dtype), variance.to(like.dtype), weight, bias, False, 0.0, eps)

    def _instance(
        self, func: Callable[..., Any], arguments: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Every sample has statistics of its own, which are part of the function: gradients go through them."""
        x = arguments["input"]
        if arguments.get("use_input_stats", True) and arguments.get("running_mean") is None:
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        if not arguments.get("use_input_stats", True) and id(arguments.get("running_mean")) not in self._trained:
            return self._as_it_came("running", func, arguments, args, kwargs)
        if x.numel() <= x.shape[0] * x.shape[1]:
            return self._as_it_came("few", func, arguments, args, kwargs)
        self._note(arguments, "example")
        return F.instance_norm(
            x, None, None, arguments.get("weight"), arguments.get("bias"), True, 0.0, arguments.get("eps", 1e-5)
        )

    def _as_it_came(
        self,
        source: Source,
        func: Callable[..., Any],
        arguments: dict[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        self._note(arguments, source)
        return func(*args, **kwargs)  # type: ignore[no-any-return]

    def _note(self, arguments: dict[str, Any], source: Source) -> None:
        known = (self._names.get(id(arguments.get(key))) for key in ("running_mean", "weight"))
        self.sources[next((path for path in known if path is not None), "batch_norm")] = source


@contextmanager
def as_trained(model: nn.Module, batch: Batch) -> Iterator[TrainingStatistics]:
    """The function that training changes, without its noise: no dropout, and statistics of the batch for normalizations.

    A normalization in evaluation mode (frozen, or the whole model is) keeps its running statistics, and so does one that
    gets one value per channel. For what is deployed use `eval_mode`. The model is left as it was.
    """
    modules = modules_of(model)
    trained = {id(module.running_mean) for module in modules if isinstance(module, _NormBase) and module.training} - {
        id(None)
    }
    own = [module for module in modules if _holds_statistics(module)]
    if bare := _tried_out(model, own, batch):
        trained |= {id(buffer) for path, buffer in model.named_buffers() if path in bare}
    statistics = TrainingStatistics(model, trained)
    # Without gradients, statistics that need not be replaced need no mode.
    needed = torch.is_grad_enabled() or bool(own) or any(isinstance(module, _NormBase) for module in modules)
    with eval_mode(model), statistics if needed else nullcontext():
        yield statistics


# By model, for the modes its modules are in: buffers that bare calls of batch_norm take as running means in training.
_known: weakref.WeakKeyDictionary[nn.Module, dict[tuple[bool, ...], frozenset[str]]] = weakref.WeakKeyDictionary()


def _tried_out(model: nn.Module, own: Sequence[nn.Module], batch: Batch) -> frozenset[str]:
    """Running means of those of the user's `own` normalizations that call F.batch_norm with training=True.

    Whether they do depends on their code: F.batch_norm(..., training=self.training) is trained with the statistics of the
    batch, F.batch_norm(..., training=False) is frozen. One pass in the model's own mode decides, the first time.
    """
    if not any(module.training for module in own):
        return frozenset()
    by_modes = _known.setdefault(model, {})
    modes = tuple(module.training for module in own)
    if modes not in by_modes:
        calls = _Calls()
        try:
            with preserve_state(model), torch.no_grad(), calls:
                call(model, own_copy(batch))
        except (RuntimeError, ValueError, TypeError, IndexError):
            calls.trained.clear()  # such a model does not train on this batch
        by_modes[modes] = frozenset(path for path, buffer in model.named_buffers() if id(buffer) in calls.trained)
    return by_modes[modes]


def _holds_statistics(module: nn.Module) -> bool:
    """Whether it may be a normalization of the user's own: two buffers or more with one number per channel."""
    if len(module._buffers) < 2 or isinstance(module, _NormBase):
        return False
    shapes = [b.shape for b in module._buffers.values() if b is not None and b.is_floating_point() and b.dim() == 1]
    return len(shapes) > len(set(shapes))


class _Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.trained: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        names = _BATCH.get(func) or _INSTANCE.get(func)
        if names is not None:
            arguments = dict(zip(names, args)) | kwargs
            if arguments.get("training", arguments.get("use_input_stats", False)):
                self.trained.add(id(arguments.get("running_mean")))
        return func(*args, **kwargs)
