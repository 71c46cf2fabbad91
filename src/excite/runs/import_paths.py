"""Names of factories, "module:factory": the import path of a callable, and the callable at an import path."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from excite._core.checks import check_text, first_line, shown
from excite._core.randomness import seeded_weights
from excite._core.wrappers import unwrap
from excite.errors import InputError, one_line

BUILT_IN = (
    "papers-cnn",
    "small-cnn",
    "resnet",
    "preact-resnet",
    "vit",
    "mlp",
    "linear",
)  # keys of excite.train.ARCHITECTURES


@dataclass(frozen=True)
class ModelSource:
    """How a model is built.

    Attributes:
        factory: Name of a built-in model, or "module:factory"; None if it is not known.
        options: Keyword arguments of the factory, as JSON values.
        missing: Why the factory is not known, in words.
    """

    factory: str | None
    options: dict[str, Any]
    missing: str = ""


def model_source(
    model: nn.Module, factory: str | Callable[..., Any] | None = None, options: Mapping[str, Any] | None = None
) -> ModelSource:
    """How a model is built again: by the factory, or by its class if that needs no arguments.

    A class is tried: it has to build a model with the same modules, parameters and buffers. Nothing is computed for that, the
    model that it builds has no values.

    Args:
        model: The model.
        factory: Name of a built-in model, "module:function", or a function or class that can be imported.
        options: Keyword arguments of the factory, as JSON values.

    Returns:
        The source; without a factory where nothing is known for certain.

    Raises:
        InputError: If the factory cannot be imported, or the options are not JSON.
    """
    if isinstance(factory, functools.partial) and not factory.args:
        bound: functools.partial[Any] = factory
        factory, options = bound.func, {**bound.keywords, **(options or {})}
    if factory is None:
        if options:
            raise InputError(
                f"options: expected a factory that takes them; got none: pass factory= for {shown(options)}"
            )
        return _class_source(unwrap(model))
    json_options = _json_options(options)
    if isinstance(factory, str):
        if ":" in factory:
            import_factory(factory)
        elif "." in factory:
            raise InputError(f"factory: expected 'module:function', or the name of a built-in model; got {factory!r}")
        elif factory not in BUILT_IN:
            near = difflib.get_close_matches(factory, BUILT_IN, 1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(BUILT_IN)}, or 'module:function'"
            )
            raise InputError(f"factory: there is no built-in model {factory!r}: {hint}")
        return ModelSource(factory, json_options)
    if not callable(factory) or isinstance(factory, nn.Module):
        raise InputError(f"factory: expected 'module:function', a function or a class; got {shown(factory)}")
    name, why = import_path(factory)
    if name is None:
        raise InputError(f"factory: {why}: pass one that a module defines, or its name 'module:function'")
    return ModelSource(name, json_options)


def import_path(made_by: Callable[..., Any]) -> tuple[str | None, str]:
    """("module:name", "") of a function or class that another program can import; (None, the reason) of any other."""
    module, name = getattr(made_by, "__module__", None), getattr(made_by, "__qualname__", None)
    if not module or not name or "<" in name:
        return None, f"{shown(made_by)} has no name that can be imported"
    if module == "__main__":
        return None, f"{name} is defined in the program itself, which cannot be imported without running it"
    target: Any = sys.modules.get(module)
    for identifier in name.split("."):
        target = getattr(target, identifier, None)
    return (f"{module}:{name}", "") if target is made_by else (None, f"{module}.{name} is something else")


def _class_source(model: nn.Module) -> ModelSource:
    model_class = type(model)
    name, why = import_path(model_class)
    return ModelSource(name, {}) if name and not (why := _differs(model_class, model)) else ModelSource(None, {}, why)


def _differs(model_class: type[nn.Module], model: nn.Module) -> str:
    """Why a class called without arguments does not build this model; empty if it does."""
    try:
        parameters = inspect.signature(model_class).parameters.values()
    except (TypeError, ValueError):
        parameters = ()  # type: ignore[assignment]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
    if needed:
        return f"{model_class.__name__} takes {', '.join(needed)}"
    try:
        with seeded_weights(0), torch.device("meta"):
            other = model_class()
    except Exception as error:
        return f"{model_class.__name__}() cannot be tried: {first_line(error)}"
    if _structure(other) != _structure(model):
        return f"{model_class.__name__}() without arguments builds another model"
    return ""


def _structure(model: nn.Module) -> object:
    return repr(model), [(name, value.shape, value.dtype) for name, value in tensors_of(model).items()]


def tensors_of(model: nn.Module) -> dict[str, Any]:
    """The state of a model without its wrappers; names without those that torch.compile inserts."""
    state = unwrap(model).state_dict()
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


def _json_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    if options is not None and not isinstance(options, Mapping):
        raise InputError(f"options: expected keyword arguments of the factory as a dict; got {shown(options)}")
    try:
        return dict(json.loads(json.dumps(dict(options or {}))))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"options: expected JSON values ({error}): build the rest inside the factory") from error


def import_factory(name: str) -> Any:
    """Imports the object that "module:factory" names. Modules in the current folder are found too.

    Args:
        name: Such as "models:Net" or "package.module:Class.method".

    Returns:
        The callable.

    Raises:
        InputError: If the module cannot be imported, or has no such callable.

    Example:
        >>> import_factory("torch.nn:Linear") is torch.nn.Linear
        True
    """
    module_name, _, path = check_text(name, "model").partition(":")
    if not module_name or not path:
        raise InputError(f"expected 'module:factory'; got {name!r}")
    added = "" not in sys.path
    if added:
        sys.path.insert(0, "")
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as error:
        raise InputError(f"cannot import {module_name!r}: {type(error).__name__}: {one_line(error)}") from error
    finally:
        if added:
            sys.path.remove("")
    for identifier in path.split("."):
        if not hasattr(target, identifier):
            raise InputError(f"{module_name!r} has no {path!r}")
        target = getattr(target, identifier)
    if not callable(target):
        raise InputError(f"{name} is not a function that makes a model: it is a {type(target).__name__}")
    return target
