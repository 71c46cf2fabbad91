"""Names of parameters and of the layers they belong to."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

Sources = tuple[str, ...]  # paths of the parameters a tensor is computed from; none for a constant


def clean_path(path: str) -> str:
    """A path without the wrappers of torch.compile and data-parallel training."""
    return ".".join(part for part in path.split(".") if part not in ("_orig_mod", "_fsdp_wrapped_module"))


def layer_name(path: str) -> str:
    """The name of the layer with this weight: its path without `.weight`.

    What a parametrization, spectral normalization or pruning keeps in place of a weight stands for that weight.
    """
    parts = path.split(".")
    if "parametrizations" in parts[:-1]:
        at = parts.index("parametrizations")
        parts = [*parts[:at], parts[at + 1]]
    path = ".".join(parts).removesuffix("_orig")
    return path.removesuffix(".weight")


class Names:
    """Names of affine calls: the weight's path without `.weight`; a second call of the same weight is `name#2`.

    `sources` has the parameters by their own path, and the model's buffers and constants (tensors that modules hold as
    attributes) as computed from no parameter, by the identity of the tensor: they are kept, so that no other tensor can
    get the same one.
    """

    def __init__(self, model: nn.Module):
        self.sources: dict[int, Sources] = {}
        self.kept: list[Tensor] = []
        self._model = model
        self._by_storage: dict[int, str] = {}
        self._modules: dict[int, str] = {}
        self._order: dict[str, int] = {}
        for path, module in model.named_modules():
            self._modules[id(module)] = clean_path(path)
            constants = [value for value in module.__dict__.values() if isinstance(value, Tensor) and value.is_leaf]
            for constant in (*module._buffers.values(), *constants):
                if constant is not None:
                    self._keep(constant, ())
        self.update()

    def update(self) -> None:
        """Take the parameters as they are now: FSDP has others inside a forward pass than outside."""
        for path, parameter in self._model.named_parameters():
            if id(parameter) not in self.sources:
                self._order.setdefault(clean_path(path), len(self._order))
                self._keep(parameter, (clean_path(path),))
                if parameter.numel() and not hasattr(parameter, "full_tensor"):  # a DTensor has no storage of its own
                    self._by_storage.setdefault(parameter.untyped_storage().data_ptr(), clean_path(path))

    def _keep(self, tensor: Tensor, sources: Sources) -> None:
        self.sources[id(tensor)] = sources
        self.kept.append(tensor)

    def parameter(self, tensor: Any) -> str | None:
        """The path of the parameter that `tensor` is, or is a view of."""
        if not isinstance(tensor, Tensor):
            return None
        sources = self.sources.get(id(tensor))
        if sources is not None:
            return sources[0] if sources else None
        if tensor._is_view() and tensor.numel():
            return self._by_storage.get(tensor.untyped_storage().data_ptr())
        return None

    def layer(self, sources: Sequence[str]) -> str:
        """The name of the affine call that is being made, whose weight is computed from these parameters.

        Of several parameters, or of none (a hypernetwork), it is the path of the module that makes the call; if that is the
        model itself, the name is that of the first of the parameters, as the model lists them.
        """
        names = set(map(layer_name, sources))
        if len(names) == 1:
            return names.pop()
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in self._modules:
                if self._modules[id(owner)]:
                    return self._modules[id(owner)]
                break
            frame = frame.f_back
        return layer_name(min(sources, key=self._order.__getitem__)) if sources else "weight"
