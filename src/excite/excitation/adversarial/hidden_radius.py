"""How far each hidden layer may be perturbed: ρ relative to the root mean square of the layer's input.

ρ is a number, a dict by layer name, `Stages` of either, or is set by a `GapController`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from excite._core.checks import check_number
from excite.errors import InputError
from excite.excitation.checks import check_names
from excite.excitation.radius import Relative, Stages
from excite.excitation.radius_control import GapController

HiddenRadius = float | Mapping[str, float] | Stages | GapController


def check_hidden_radius(
    radius: object, known: Sequence[str], held_out: object, model: nn.Module
) -> float | Mapping[str, float] | Stages:
    """The hidden radius, or an InputError.

    Args:
        radius: As passed; "auto" is checked by `GapController`.
        known: Names of the model's layers.
        held_out: As passed; only allowed with "auto".
        model: The model.
    """
    if held_out is not None:
        raise InputError("held_out: expected with hidden_radius='auto' only")
    if isinstance(radius, Stages):
        if isinstance(radius.radius, Relative):
            raise InputError(
                "hidden_radius is relative already: expected Stages of a number or of a dict by layer name"
            )
        check_hidden_radius(radius.radius, known, None, model)
        return radius
    description = "hidden_radius (relative to the root mean square of a layer's input)"
    if not isinstance(radius, Mapping):
        return check_number(radius, description, 0, 1e6)
    check_names(map(str, radius), known, model)
    by_layer = {name: check_number(value, f"{description} of {name!r}", 0, 1e6) for name, value in radius.items()}
    if not any(by_layer.values()):
        raise InputError("hidden_radius: no layer has a radius above 0: give hidden_radius=0 to perturb none")
    return by_layer


def stage_of(radius: HiddenRadius, progress: float) -> tuple[float | Mapping[str, float], float]:
    """The full hidden radius, and the fraction of it at this stage of training; not for a controller."""
    assert not isinstance(radius, GapController)
    if not isinstance(radius, Stages):
        return radius, 1.0
    assert isinstance(radius.radius, int | float | Mapping)
    return radius.radius, radius.share(progress)


def hidden_radius_of(radius: HiddenRadius, layers: str | Sequence[str], layer: str, progress: float) -> float | Tensor:
    """ρ of one layer.

    Args:
        radius: The hidden radius.
        layers: "all", or the names of the layers to perturb.
        layer: Name of a call: the second call of a weight, `name#2`, has the radius of `name` unless it is named itself.
        progress: Fraction of training that is done.

    Returns:
        A number, or the tensor of the controller; 0 where the layer is not perturbed.
    """
    first = layer.split("#")[0]
    if layers != "all" and layer not in layers and first not in layers:
        return 0.0
    if isinstance(radius, GapController):
        return radius.factor
    hidden, fraction = stage_of(radius, progress)
    return fraction * (hidden.get(layer, hidden.get(first, 0.0)) if isinstance(hidden, Mapping) else hidden)


def named_layers(radius: HiddenRadius) -> list[str]:
    """Names in a hidden radius by layer."""
    full = radius.radius if isinstance(radius, Stages) else radius
    return list(full) if isinstance(full, Mapping) else []


def named_sites(radius: HiddenRadius, layers: str | Sequence[str]) -> list[str]:
    """Names of layers and of outputs of modules that are chosen one by one."""
    return [*named_layers(radius), *([] if isinstance(layers, str) else layers)]
