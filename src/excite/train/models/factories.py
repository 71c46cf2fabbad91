"""Models by name: a built-in network, or "module:factory", a function of the user's that returns a module."""

from __future__ import annotations

from typing import Any

from torch import nn

from excite._core.checks import check_text
from excite._core.randomness import seeded_weights
from excite.errors import ExciteError, InputError, one_line
from excite.runs.import_paths import import_factory
from excite.train.models.architectures import ARCHITECTURES, build


def make_model(name: str, *, seed: int = 0, **options: Any) -> nn.Module:
    """Builds a model by name. The global random state is left unchanged.

    Args:
        name: Built-in name (see `build`), or "module:factory" for a function that returns a module.
        seed: Seed of the weights.
        **options: Keywords of the network's function or of the factory.

    Returns:
        The model, on the CPU.

    Raises:
        InputError: If the name is unknown, or the factory cannot be imported or does not return a module.

    Example:
        >>> model = make_model("small-cnn", seed=3, outputs=10)
    """
    if ":" not in check_text(name, "model"):
        if name not in ARCHITECTURES and "." in name:
            raise InputError(f"model {name!r}: expected a built-in name or 'module:factory'")
        return build(name, seed=seed, **options)
    factory = import_factory(name)
    with seeded_weights(seed):
        try:
            model = factory(**options)
        except ExciteError:
            raise
        except Exception as error:
            raise InputError(f"{name} could not make a model: {type(error).__name__}: {one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"{name} returned {type(model).__name__}, not a torch.nn.Module")
    return model
