"""Names of earlier versions that still work, each with a DeprecationWarning that says what to write instead."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_C = TypeVar("_C")
UNTIL = "the earlier name works until version 0.3"

# Import paths that were documented. Modules below a renamed package that are not listed are refused by name.
MODULES = {
    "excite.alerts": "excite.monitor.alerts",
    "excite.auditing": "excite.report.audit",
    "excite.config": "excite.train.config",
    "excite.engines": "excite.jobs.executors",
    "excite.fit": "excite.train",
    "excite.fit.captured": "excite.train.cuda_graph",
    "excite.integrations.sinks": "excite.monitor.sinks",
    "excite.robust": "excite.margin.fixed_radius",
    "excite.studies.regions_figure": "excite.studies.trajectory.regions",
    "excite.sweeping": "excite.jobs.sweep",
    "excite.training": "excite.train.from_config",
    "excite.watching": "excite.monitor.watch",
}

# Command-line options.
OPTIONS = {"--arms": "--variants", "--gpus-per-task": "--gpus-per-job"}


class RenamedModules(MetaPathFinder, Loader):
    """Imports a module under its earlier name: the same module object, not a copy."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MODULES:
            return ModuleSpec(fullname, self)
        package = fullname.rpartition(".")[0]
        if package in MODULES:
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: {package} is now {MODULES[package]}, and its modules were renamed",
                name=fullname,
            )
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = MODULES[spec.name]
        warnings.warn(f"{spec.name} is deprecated: import {new} instead ({UNTIL})", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__  # the import system replaces it
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Makes earlier import paths work in this process."""
    if not any(isinstance(finder, RenamedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, RenamedModules())  # before the file system: `excite.fit.X` must not be a second copy


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Issues the DeprecationWarning for the name `old`, as seen from the caller of the calling function."""
    warnings.warn(f"{old} is deprecated: use {new} instead ({UNTIL})", DeprecationWarning, stacklevel=stacklevel)


def renamed_keywords(**new_names: str) -> Callable[[_F], _F]:
    """Decorator: lets a function still be called with the earlier names of its keywords.

    Args:
        **new_names: The present name of each earlier keyword, as in ``@renamed_keywords(arms="variants")``.

    Returns:
        A decorator. The decorated function raises TypeError where a keyword is passed under both names.
    """

    def decorate(function: _F) -> _F:
        name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old, new in new_names.items():
                if old in kwargs:
                    if new in kwargs:
                        raise TypeError(f"{name}() got both {old!r} and {new!r}, its present name")
                    warn_renamed(f"{name}({old}=...)", f"{new}=...")
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def renamed_fields(**new_names: str) -> Callable[[type[_C]], type[_C]]:
    """Class decorator: lets a dataclass still be made with, and read by, the earlier names of its fields.

    Args:
        **new_names: The present name of each earlier field, as in ``@renamed_fields(looks="measurements")``.

    Returns:
        A decorator, to be written above ``@dataclass``.
    """

    def decorate(cls: type[_C]) -> type[_C]:
        cls.__init__ = renamed_keywords(**new_names)(cls.__init__)  # type: ignore[method-assign]
        for old, new in new_names.items():
            setattr(cls, old, renamed_attribute(old, new))
        return cls

    return decorate


def converted_keywords(**conversions: tuple[str, Callable[[Any], Any]]) -> Callable[[_F], _F]:
    """Decorator: lets a function still be called with earlier keywords whose values have another form now.

    Args:
        **conversions: For each earlier keyword its present name and the function that converts its value.

    Returns:
        A decorator. The decorated function raises TypeError where two of the keywords mean the same.
    """

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old, (new, convert) in conversions.items():
                if kwargs.get(old) is not None:
                    if kwargs.get(new) is not None:
                        raise TypeError(
                            f"{function.__name__}() got {old!r} and another value for {new!r}, its present name"
                        )
                    warn_renamed(f"{function.__name__}({old}=...)", f"{new}=...")
                    kwargs[new] = convert(kwargs[old])
                kwargs.pop(old, None)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def moved_keywords(options_type: type[Any]) -> Callable[[_F], _F]:
    """Decorator: lets a function still be called with keywords that are now fields of its options object.

    Args:
        options_type: Dataclass of what the function takes as ``options``.

    Returns:
        A decorator. The decorated function passes such keywords on in ``options``, with a warning that points at the user's
        line.
    """
    names = {item.name for item in dataclasses.fields(options_type)}

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            moved = {name: kwargs.pop(name) for name in names & kwargs.keys()}
            if moved:
                from excite._core.warn import warn_user

                new = f"options={options_type.__name__}({', '.join(f'{name}=...' for name in sorted(moved))})"
                old = ", ".join(f"{name}=..." for name in sorted(moved))
                warn_user(f"{function.__name__}({old}) is deprecated: use {new} instead ({UNTIL})", DeprecationWarning)
                options = kwargs.get("options")
                kwargs["options"] = options_type(**moved) if options is None else dataclasses.replace(options, **moved)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def renamed_attribute(old: str, new: str) -> Any:
    """Makes a read-only property that returns the attribute `new` under its earlier name.

    Used as in ``arms = renamed_attribute("arms", "variants")``.
    """

    def get(self: Any) -> Any:
        warn_renamed(f"{type(self).__name__}.{old}", f"{type(self).__name__}.{new}")
        return getattr(self, new)

    return property(get)


def renamed_names(module: str, new_names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that still finds objects under their earlier names.

    Args:
        module: ``__name__`` of the module.
        new_names: The present name of each earlier name.
    """

    def get(name: str) -> Any:
        if name in new_names:
            warn_renamed(f"{module}.{name}", f"{module}.{new_names[name]}")
            return getattr(sys.modules[module], new_names[name])
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


def present_options(arguments: Sequence[str]) -> list[str]:
    """Replaces earlier names of command-line options, as in ``--arms all`` or ``--arms=all``, by the present ones."""
    present = []
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if option in OPTIONS:
            warn_renamed(option, OPTIONS[option])
            argument = f"{OPTIONS[option]}{equals}{value}"
        present.append(argument)
    return present
