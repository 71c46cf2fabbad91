"""Names of parameters and of the layers they belong to."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

OUTPUT = ":output"  # after the path of a module: the signal that the module returns
Sources = tuple[str, ...]  # paths of the parameters a tensor is computed from; none for a constant


def clean_path(path: str) -> str:
    """A path without the wrappers of torch.compile and data-parallel training."""
    if "_orig_mod" not in path and "_fsdp_wrapped_module" not in path:
        return path
    return ".".join(name for name in path.split(".") if name not in ("_orig_mod", "_fsdp_wrapped_module"))


def layer_name(path: str) -> str:
    """The name of the layer with this weight: its path without `.weight`.

    What a parametrization, spectral normalization or pruning keeps in place of a weight stands for that weight.
    """
    if "parametrizations." in path:
        path_names = path.split(".")
        at = path_names.index("parametrizations") if "parametrizations" in path_names else len(path_names)
        path = ".".join([*path_names[:at], *path_names[at + 1 : at + 2]])
    if path.endswith("weight_orig"):
        path = path.removesuffix("_orig")
    return path.removesuffix(".weight")


def module_outputs(model: nn.Module, names: Collection[str]) -> dict[str, nn.Module]:
    """The modules that names such as "blocks.3:output" stand for; other names are left out."""
    bases = {name.split("#")[0] for name in names if name.split("#")[0].endswith(OUTPUT)}
    modules = {f"{clean_path(path)}{OUTPUT}": module for path, module in model.named_modules() if bases and path}
    return {name: module for name, module in modules.items() if name in bases}


def _storage(tensor: Tensor) -> int:
    """Identifies the memory of a tensor: its address; on the meta device, where there is none, the storage object."""
    storage = tensor.untyped_storage()
    return int(storage._cdata if tensor.is_meta else storage.data_ptr())


class Names:
    """Names of affine calls: the weight's path without `.weight`; a second call of the same weight is `name#2`.

    `sources` has the parameters by their own path, and the model's buffers and constants (tensors that modules hold as
    attributes) as computed from no parameter, by the identity of the tensor: they are kept, so that no other tensor can
    get the same one. `outputs` has the modules whose outputs are sites, by `PATH:output`.
    """

    def __init__(self, model: nn.Module, outputs: Collection[str] = ()):
        self.outputs = module_outputs(model, outputs)
        self.sources: dict[int, Sources] = {}
        self.of_one: dict[Sources, str] = {}  # names of the calls whose weight is computed from one parameter
        self.references: list[Tensor] = []
        self.computed: dict[int, tuple[Sources | None, weakref.ref[Tensor]]] = {}  # in the last pass
        self._model = model
        self._by_storage: dict[int, str] = {}
        self._modules: dict[int, str] = {}
        self._order: dict[str, int] = {}
        for path, module in model.named_modules():
            path = self._modules[id(module)] = clean_path(path)
            self._add_parameters(path, module)
            for value in module._buffers.values():
                if value is not None:
                    self._add(value, ())
            for value in module.__dict__.values():
                if isinstance(value, Tensor) and value.is_leaf:
                    self._add(value, ())

    def update(self) -> None:
        """Take the parameters as they are now: FSDP has others inside a forward pass than outside."""
        for path, module in self._model.named_modules():
            self._add_parameters(clean_path(path), module)

    def _add_parameters(self, path: str, module: nn.Module) -> None:
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in self.sources:
                name = f"{path}.{key}" if path else key
                self._add(parameter, (name,))
                self.of_one[(name,)] = layer_name(name)
                self._order.setdefault(name, len(self._order))
                if parameter.numel() and not hasattr(parameter, "full_tensor"):  # a DTensor has no storage of its own
                    self._by_storage.setdefault(_storage(parameter), name)

    def _add(self, tensor: Tensor, sources: Sources) -> None:
        self.sources[id(tensor)] = sources
        self.references.append(tensor)

    def parameter(self, tensor: Any) -> str | None:
        """The path of the parameter that `tensor` is, or is a view of."""
        if not isinstance(tensor, Tensor):
            return None
        sources = self.sources.get(id(tensor))
        if sources is not None:
            return sources[0] if sources else None
        if tensor._is_view() and tensor.numel():
            return self._by_storage.get(_storage(tensor))
        return None

    def layer(self, sources: Sequence[str]) -> str:
        """The name of the affine call that is being made, whose weight is computed from these parameters.

        Of several parameters, or of none (a hypernetwork), it is the path of the module that makes the call; if that is the
        model itself, the name is that of the first of the parameters, as the model lists them.
        """
        if len(sources) == 1:
            return layer_name(sources[0])
        names = set(map(layer_name, sources))
        if len(names) == 1:
            return names.pop()
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, nn.Module) and id(caller) in self._modules:
                if self._modules[id(caller)]:
                    return self._modules[id(caller)]
                break
            frame = frame.f_back
        return layer_name(min(sources, key=self._order.__getitem__)) if sources else "weight"
