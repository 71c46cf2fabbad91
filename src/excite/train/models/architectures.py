"""Small networks by name, with weights that depend on a seed and on nothing else."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from excite._core.checks import check_count, is_number
from excite._core.randomness import seeded_weights
from excite.errors import InputError
from excite.train.models.resnet import preact_resnet, resnet
from excite.train.models.vit import vit

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "leaky-relu": nn.LeakyReLU, "tanh": nn.Tanh}


def papers_cnn(
    channels: int = 3,
    outputs: int = 1,
    dropout: float = 0.0,
    widths: Sequence[int] = (12, 32, 240, 192),
    activation: str = "leaky-relu",
) -> nn.Module:
    """The authors' network for planes and horses; images of 32×32.

    `widths`: channels of the two convolutions, units of the two fully connected hidden layers; (6, 18, 120, 84) with
    "relu" is the network of figure 1 of the richness paper. With `dropout` above 0 the units of the two fully connected
    hidden layers are dropped with that probability.
    """
    if not is_number(dropout) or not 0 <= dropout < 1:
        raise InputError(f"papers-cnn: expected dropout of at least 0 and less than 1; got {dropout!r}")
    if not isinstance(widths, list | tuple) or len(widths) != 4:
        raise InputError(f"papers-cnn: expected widths as a list of four numbers; got {widths!r}")
    _positive(channels=channels, outputs=outputs, **{f"widths[{i}]": width for i, width in enumerate(widths)})
    act = _activation("papers-cnn", activation)
    conv1, conv2, hidden1, hidden2 = widths
    first, second = ([nn.Dropout(dropout)] if dropout else [] for _ in range(2))
    return nn.Sequential(
        nn.Conv2d(channels, conv1, 5), act(), nn.MaxPool2d(2),
        nn.Conv2d(conv1, conv2, 5), act(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(25 * conv2, hidden1), act(), *first,
        nn.Linear(hidden1, hidden2), act(), *second, nn.Linear(hidden2, outputs),
    )  # fmt: skip


def small_cnn(channels: int = 1, size: int = 8, outputs: int = 1) -> nn.Module:
    """Four affine layers for small square images, such as the 8×8 digits."""
    _positive(channels=channels, size=size, outputs=outputs)
    side = (size - 2) // 2
    if side < 1:
        raise InputError(f"small-cnn: expected images of at least 4×4; got size={size}")
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1), nn.LeakyReLU(), nn.Conv2d(8, 16, 3), nn.LeakyReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * side * side, 32), nn.LeakyReLU(), nn.Linear(32, outputs),
    )  # fmt: skip


def mlp(inputs: int, widths: Sequence[int] = (32, 32), outputs: int = 1, activation: str = "relu") -> nn.Module:
    """Linear layers of the given widths with an activation between; inputs of any shape are flattened."""
    act = _activation("mlp", activation)
    if not isinstance(widths, list | tuple):
        raise InputError(f"mlp: expected widths as a list of numbers; got {widths!r}")
    _positive(inputs=inputs, outputs=outputs, **{f"widths[{i}]": width for i, width in enumerate(widths)})
    sizes = [inputs, *widths]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), act()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def linear(inputs: int, outputs: int = 1) -> nn.Module:
    """One affine layer; inputs of any shape are flattened."""
    _positive(inputs=inputs, outputs=outputs)
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs))


ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {
    "papers-cnn": papers_cnn, "small-cnn": small_cnn, "resnet": resnet, "preact-resnet": preact_resnet, "vit": vit, "mlp": mlp,
    "linear": linear,
}  # fmt: skip
"""Built-in networks by name: functions whose keyword arguments are the `options` of a config's `[model]`."""

_IMAGES = ("papers-cnn", "small-cnn", "resnet", "preact-resnet", "vit")


def build(name: str, *, seed: int = 0, **options: Any) -> nn.Module:
    """Builds a built-in network. The global random state is left unchanged.

    Args:
        name: Key of `ARCHITECTURES`: "papers-cnn", "small-cnn", "resnet", "preact-resnet", "vit", "mlp" or "linear".
        seed: Seed of the weights.
        **options: Keywords of the network's function, such as `inputs` and `widths` for "mlp".

    Returns:
        The network, on the CPU.

    Raises:
        InputError: If the name or an option is unknown, or an option is missing or invalid.

    Example:
        >>> model = build("mlp", inputs=2, widths=(16, 16), seed=1)
    """
    if name not in ARCHITECTURES:
        near = difflib.get_close_matches(str(name), ARCHITECTURES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(ARCHITECTURES)}"
        raise InputError(f"unknown model {name!r}: {hint}")
    make = ARCHITECTURES[name]
    known = inspect.signature(make).parameters
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"its options: {', '.join(known)}"
            raise InputError(f"{name} has no option {option!r}: {hint}")
    for option, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and option not in options:
            raise InputError(f"{name} needs the option {option!r}")
    with seeded_weights(seed):
        return make(**options)


def options_for(name: str, shape: Sequence[int], outputs: int) -> dict[str, int]:
    """Returns the options of a built-in network that follow from the shape of one point and the number of outputs."""
    if name in _IMAGES:
        if len(shape) != 3 or shape[1] != shape[2] or (name == "papers-cnn" and shape[1] != 32):
            expected = "32×32 images" if name == "papers-cnn" else "square images"
            raise InputError(f"{name} takes {expected}; the data has points of shape {tuple(shape)}: choose 'mlp'")
        options = {"channels": shape[0], "outputs": outputs}
        return {**options, "size": shape[1]} if name in ("small-cnn", "vit") else options
    return {"inputs": int(torch.Size(shape).numel()), "outputs": outputs}


def _activation(model: str, name: str) -> Callable[[], nn.Module]:
    if name not in _ACTIVATIONS:
        raise InputError(f"{model}: expected activation {', '.join(map(repr, _ACTIVATIONS))}; got {name!r}")
    return _ACTIVATIONS[name]


def _positive(**numbers: Any) -> None:
    for name, number in numbers.items():
        check_count(number, name)
